"""All routes of the API."""

from __future__ import annotations

from quickstep.server.anthropic.endpoint import CountTokens, Messages, with_checked_betas
from quickstep.server.anthropic.request_types import CountTokensRequest, MessagesRequest
from quickstep.server.anthropic.response_types import EVENTS as MESSAGES_EVENTS
from quickstep.server.anthropic.response_types import MessageResponse, TokenCount
from quickstep.server.batches.endpoint import LocalBatches
from quickstep.server.first_routes import generating_routes, probe_routes
from quickstep.server.generate.adapter import Served
from quickstep.server.generate.endpoint import GeneratingRoute
from quickstep.server.http.errors import anthropic_shape
from quickstep.server.http.route import ApiRoute
from quickstep.server.llama_cpp.endpoint import llama_cpp_routes
from quickstep.server.metrics import Metrics
from quickstep.server.ollama.routes import ollama_routes
from quickstep.server.openai.embedding_types import EmbeddingList, EmbeddingRequest
from quickstep.server.openai.embeddings import Embeddings
from quickstep.server.openai.invocations import invocations_route
from quickstep.server.openai.tokenize import Tokenizing
from quickstep.server.options import ServerOptions
from quickstep.server.responses.endpoint import Responses
from quickstep.server.responses.request_types import InputItemsQuery, ResponsesRequest
from quickstep.server.responses.response_types import EVENTS as RESPONSES_EVENTS
from quickstep.server.responses.response_types import DeletedResponse, InputItems, ResponseObject
from quickstep.server.responses.store import ResponseStore, StoredResponses
from quickstep.server.schema.pages import ApiDocument, ApiPages

__all__ = ["api_routes"]


def api_routes(
    served: Served, metrics: Metrics, options: ServerOptions, batches: LocalBatches | None = None
) -> list[ApiRoute]:
    """Every route, in the order of the reference. The app starts and stops `batches`."""
    batches = batches or LocalBatches(served, metrics, options)
    generating = generating_routes(served, metrics)
    embeddings = _embeddings(served, metrics)
    routes = [
        *generating,
        embeddings,
        invocations_route([*generating, embeddings]),
        *_responses(served, metrics, options),
        *_anthropic(served, metrics),
        *batches.routes(),
        *Tokenizing(served).routes(),
        *llama_cpp_routes(served, metrics),
        *ollama_routes(served, metrics),
        *probe_routes(served, metrics, options),
    ]
    pages = ApiPages(routes, served)  # they tell of themselves, too
    routes += _pages(pages)
    return routes


def _embeddings(served: Served, metrics: Metrics) -> ApiRoute:
    return ApiRoute(
        "POST",
        "/v1/embeddings",
        Embeddings(served, metrics).answer,
        "A vector for each input.",
        request=EmbeddingRequest,
        response=EmbeddingList,
        aliases=("/embeddings",),
    )


def _responses(served: Served, metrics: Metrics, options: ServerOptions) -> list[ApiRoute]:
    store = ResponseStore(options.stored_responses, options.stored_response_bytes)
    stored = StoredResponses(store)
    one = "/v1/responses/{response_id}"
    return [
        ApiRoute(
            "POST",
            "/v1/responses",
            GeneratingRoute(Responses(store), served, metrics).answer,
            "OpenAI's Responses API.",
            request=ResponsesRequest,
            response=ResponseObject,
            streams=True,
            events=RESPONSES_EVENTS,
        ),
        ApiRoute("GET", one, stored.retrieve, "A stored response.", response=ResponseObject),
        ApiRoute("DELETE", one, stored.delete, "Forget a response.", response=DeletedResponse),
        ApiRoute(
            "GET",
            f"{one}/input_items",
            stored.input_items,
            "What a stored response answers.",
            response=InputItems,
            query=InputItemsQuery,
        ),
    ]


def _anthropic(served: Served, metrics: Metrics) -> list[ApiRoute]:
    return [
        ApiRoute(
            "POST",
            "/v1/messages",
            with_checked_betas(
                GeneratingRoute(Messages(), served, metrics).answer, served.field_rules
            ),
            "Anthropic's Messages API.",
            request=MessagesRequest,
            response=MessageResponse,
            streams=True,
            events=MESSAGES_EVENTS,
            error_shape=anthropic_shape,
        ),
        ApiRoute(
            "POST",
            "/v1/messages/count_tokens",
            with_checked_betas(CountTokens(served).answer, served.field_rules),
            "How many tokens a message's input has.",
            request=CountTokensRequest,
            response=TokenCount,
            error_shape=anthropic_shape,
        ),
    ]


def _pages(pages: ApiPages) -> list[ApiRoute]:
    return [
        ApiRoute(
            "GET", "/openapi.json", pages.document, "This API as OpenAPI 3.1.", None, ApiDocument
        ),
        # the same page for everybody, so it needs no key; the document that it reads does
        ApiRoute(
            "GET",
            "/docs",
            pages.page,
            "This API as a page.",
            is_probe=True,
            content_type="text/html",
        ),
    ]
