"""Every route of the server, with the types of its request and response.

`app` serves them, and the reference of the API is written from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import UnionType

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quickstep.errors import RequestError
from quickstep.server.anthropic.endpoint import CountTokens, Messages, with_checked_betas
from quickstep.server.anthropic.request_types import CountTokensRequest, MessagesRequest
from quickstep.server.anthropic.response_types import EVENTS as MESSAGES_EVENTS
from quickstep.server.anthropic.response_types import MessageResponse, TokenCount
from quickstep.server.batches.endpoint import LocalBatches
from quickstep.server.fields.decode import decode
from quickstep.server.generate.endpoint import GeneratingRoute
from quickstep.server.http.body import body_of
from quickstep.server.http.errors import anthropic_shape
from quickstep.server.http.route import ApiRoute
from quickstep.server.kept_streams.stream_routes import StreamRoutes
from quickstep.server.llama_cpp.endpoint import llama_cpp_routes
from quickstep.server.models.registry import ModelRegistry
from quickstep.server.ollama.routes import ollama_routes
from quickstep.server.openai.chat import Chat
from quickstep.server.openai.completions import Completions
from quickstep.server.openai.embeddings import Embeddings
from quickstep.server.openai.request_types import ChatRequest, CompletionRequest, EmbeddingRequest
from quickstep.server.openai.response_types import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    EmbeddingList,
    ModelCard,
    ModelList,
)
from quickstep.server.openai.tokenize import Tokenizing
from quickstep.server.operate.debug import Debug
from quickstep.server.operate.lora_routes import lora_routes
from quickstep.server.operate.metrics import ServerMetrics
from quickstep.server.operate.models import ModelRoutes
from quickstep.server.operate.prefix_cache import prefix_cache_routes
from quickstep.server.operate.probes import Health, Pong, Probes, Readiness, Version
from quickstep.server.operate.replicas import ReplicaRoutes
from quickstep.server.options import ServerOptions
from quickstep.server.page.endpoint import Page
from quickstep.server.reference.openapi import ApiDocument, ApiPages
from quickstep.server.responses.endpoint import Responses
from quickstep.server.responses.request_types import (
    InputItemsQuery,
    ResponsesRequest,
    RetrieveQuery,
)
from quickstep.server.responses.response_types import EVENTS as RESPONSES_EVENTS
from quickstep.server.responses.response_types import DeletedResponse, InputItems, ResponseObject
from quickstep.server.responses.store import ResponseStore, StoredResponses
from quickstep.server.scores.endpoint import Scores
from quickstep.server.scores.request_types import ClassifyRequest, RerankRequest, ScoreRequest
from quickstep.server.scores.response_types import ClassifyList, RerankResponse, ScoreList

_NOT_GIVEN = msgspec.Raw()


def api_routes(
    models: ModelRegistry,
    metrics: ServerMetrics,
    options: ServerOptions,
    batches: LocalBatches | None = None,
    responses: ResponseStore | None = None,
) -> list[ApiRoute]:
    """Every route, in the order of the reference. The app starts and stops `batches`, and opens
    and closes `responses`.
    """
    batches = batches or LocalBatches(models, metrics, options)
    responses = ResponseStore() if responses is None else responses
    generating, probes = _generating(models, metrics), Probes(models, metrics, options.stall_s)
    embeddings = _embeddings(models, metrics)
    routes = [
        *generating,
        embeddings,
        _invocations([*generating, embeddings]),
        *_scores(models, metrics),
        *_responses(models, metrics, responses),
        *StreamRoutes(models.server.kept_streams, options.field_rules).routes(),
        *_anthropic(models, metrics),
        *batches.routes(),
        *Tokenizing(models).routes(),
        *llama_cpp_routes(models, metrics),
        *ollama_routes(models, metrics),
        *Page(is_served=options.page).routes(),
        *_models(probes),
        *_probes(probes),
        *Debug(models).routes(),
        *prefix_cache_routes(models),
        *lora_routes(models),
        *ReplicaRoutes(models).routes(),
        *ModelRoutes(models).routes(),
    ]
    pages = ApiPages(routes, models)  # the document describes these two as well
    routes += _pages(pages)
    return routes


def _generating(models: ModelRegistry, metrics: ServerMetrics) -> list[ApiRoute]:
    """Chat and completions."""
    chat = GeneratingRoute(Chat(), models, metrics, has_sampling_fields=True)
    completions = GeneratingRoute(Completions(), models, metrics, has_sampling_fields=True)
    return [
        ApiRoute(
            "POST",
            "/v1/chat/completions",
            chat.answer,
            "The assistant's next message.",
            is_repeatable=True,
            request=ChatRequest,
            response=ChatCompletion,
            streams=True,
            events=(ChatCompletionChunk,),
            aliases=("/chat/completions",),
        ),
        ApiRoute(
            "POST",
            "/v1/completions",
            completions.answer,
            "Text that continues a prompt.",
            is_repeatable=True,
            request=CompletionRequest,
            response=Completion,
            streams=True,
            events=(CompletionChunk,),
            aliases=("/completions",),
        ),
    ]


def _embeddings(models: ModelRegistry, metrics: ServerMetrics) -> ApiRoute:
    return ApiRoute(
        "POST",
        "/v1/embeddings",
        Embeddings(models, metrics).answer,
        "A vector for each input.",
        is_repeatable=True,
        request=EmbeddingRequest,
        response=EmbeddingList,
        aliases=("/embeddings",),
    )


def _scores(models: ModelRegistry, metrics: ServerMetrics) -> list[ApiRoute]:
    scores = Scores(models, metrics)
    reranks = [
        ApiRoute(
            "POST",
            path,
            scores.rerank,
            "Documents, sorted by how well they answer a query.",
            is_repeatable=True,
            request=RerankRequest,
            response=RerankResponse,
            aliases=aliases,
        )
        for path, aliases in (("/v1/rerank", ("/rerank",)), ("/v2/rerank", ()))
    ]
    return [
        *reranks,
        ApiRoute(
            "POST",
            "/v1/score",
            scores.score,
            "How well texts answer others.",
            is_repeatable=True,
            request=ScoreRequest,
            response=ScoreList,
            aliases=("/score",),
        ),
        ApiRoute(
            "POST",
            "/v1/classify",
            scores.classify,
            "The classes of texts.",
            is_repeatable=True,
            request=ClassifyRequest,
            response=ClassifyList,
            aliases=("/classify",),
        ),
    ]


class _Shape(msgspec.Struct, frozen=True):
    """The fields by which `/invocations` chooses a route."""

    messages: msgspec.Raw = _NOT_GIVEN
    prompt: msgspec.Raw = _NOT_GIVEN
    input: msgspec.Raw = _NOT_GIVEN


def _invocations(routes: Sequence[ApiRoute]) -> ApiRoute:
    """SageMaker's one route, for the bodies of chat, completions and embeddings, in this order."""
    fields = _Shape.__struct_fields__

    async def answer(request: Request) -> Response:
        body = body_of(request)
        shape = decode(body, _Shape)
        for name, route in zip(fields, routes, strict=True):
            if bytes(getattr(shape, name)) not in (b"", b"null"):
                return await route.endpoint(request)
        raise RequestError(
            "the body has none of messages (chat), prompt (completions) and input (embeddings)",
            param=fields[0],
        )

    responses: UnionType = routes[0].response
    for route in routes[1:]:
        responses = responses | route.response
    return ApiRoute(
        "POST",
        "/invocations",
        answer,
        "Chat, completions or embeddings, as the body has messages, prompt or input.",
        is_repeatable=True,
        requests=tuple(route.request for route in routes if route.request is not None),
        response=responses,
        streams=True,
        events=tuple(event for route in routes for event in route.events),
    )


def _responses(
    models: ModelRegistry, metrics: ServerMetrics, store: ResponseStore
) -> list[ApiRoute]:
    stored = StoredResponses(store, models.server.kept_streams, models.server.lanes)
    one = "/v1/responses/{response_id}"
    return [
        ApiRoute(
            "POST",
            "/v1/responses",
            GeneratingRoute(Responses(store), models, metrics, has_sampling_fields=True).answer,
            "OpenAI's Responses API.",
            is_repeatable=True,
            request=ResponsesRequest,
            response=ResponseObject,
            streams=True,
            events=RESPONSES_EVENTS,
            aliases=("/responses",),
        ),
        ApiRoute(
            "GET",
            one,
            stored.retrieve,
            "A stored response, or one in the background: its present state or its events.",
            response=ResponseObject,
            streams=True,
            events=RESPONSES_EVENTS,
            query=RetrieveQuery,
            aliases=(one.removeprefix("/v1"),),
        ),
        ApiRoute(
            "DELETE",
            one,
            stored.delete,
            "Forget a response.",
            response=DeletedResponse,
            aliases=(one.removeprefix("/v1"),),
        ),
        ApiRoute(
            "POST",
            f"{one}/cancel",
            stored.cancel,
            "End a response in the background.",
            response=ResponseObject,
            aliases=(f"{one.removeprefix('/v1')}/cancel",),
        ),
        ApiRoute(
            "GET",
            f"{one}/input_items",
            stored.input_items,
            "What a stored response answers.",
            response=InputItems,
            query=InputItemsQuery,
            aliases=(f"{one.removeprefix('/v1')}/input_items",),
        ),
    ]


def _anthropic(models: ModelRegistry, metrics: ServerMetrics) -> list[ApiRoute]:
    return [
        ApiRoute(
            "POST",
            "/v1/messages",
            with_checked_betas(
                GeneratingRoute(Messages(), models, metrics).answer, models.server.field_rules
            ),
            "Anthropic's Messages API.",
            is_repeatable=True,
            request=MessagesRequest,
            response=MessageResponse,
            streams=True,
            events=MESSAGES_EVENTS,
            error_shape=anthropic_shape,
        ),
        ApiRoute(
            "POST",
            "/v1/messages/count_tokens",
            with_checked_betas(CountTokens(models).answer, models.server.field_rules),
            "How many tokens a message's input has.",
            request=CountTokensRequest,
            response=TokenCount,
            error_shape=anthropic_shape,
            is_limited=True,
        ),
    ]


def _models(probes: Probes) -> list[ApiRoute]:
    return [
        ApiRoute(
            "GET",
            "/v1/models",
            probes.models,
            "All names that are served.",
            None,
            ModelList,
            aliases=("/models",),
        ),
        ApiRoute(
            "GET", "/v1/models/{model:path}", probes.model, "One served name.", None, ModelCard
        ),
    ]


def _probes(probes: Probes) -> list[ApiRoute]:
    return [
        ApiRoute(
            "GET", "/health", probes.health, "Whether steps finish.", None, Health, is_probe=True
        ),
        ApiRoute(
            "GET",
            "/ready",
            probes.ready,
            "Whether requests are welcome.",
            None,
            Readiness,
            is_probe=True,
        ),
        ApiRoute("GET", "/metrics", probes.metrics, "Prometheus text."),
        ApiRoute("GET", "/version", probes.version, "The version of Quickstep.", None, Version),
        ApiRoute("GET", "/ping", probes.ping, "The process answers.", None, Pong, is_probe=True),
        ApiRoute("POST", "/ping", probes.ping, "The process answers.", None, Pong, is_probe=True),
    ]


def _pages(pages: ApiPages) -> list[ApiRoute]:
    return [
        ApiRoute(
            "GET", "/openapi.json", pages.document, "This API as OpenAPI 3.1.", None, ApiDocument
        ),
        # the page is the same for every client, so it needs no key; the document that it reads does
        ApiRoute(
            "GET",
            "/docs",
            pages.page,
            "This API as a page.",
            is_probe=True,
            content_type="text/html",
        ),
    ]
