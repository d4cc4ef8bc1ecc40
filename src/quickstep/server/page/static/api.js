// Requests to this server. Paths are relative to the page, so that a proxy's path prefix works.
// The API key is kept in the tab's session storage only.
import { T } from "./texts.js";

const KEY = "quickstep.key";

export const apiKey = () => sessionStorage.getItem(KEY) || "";
export const setApiKey = (key) => sessionStorage.setItem(KEY, key.trim());

/** An error that the server reported; `param` names the field of the request. */
export class ApiError extends Error {
  constructor(message, status, param) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

async function request(path, options = {}) {
  const headers = { ...options.headers };
  if (apiKey()) headers.authorization = `Bearer ${apiKey()}`;
  const response = await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store" });
  if (response.ok) return response;
  const error = (await response.json().catch(() => ({}))).error ?? {};
  throw new ApiError(error.message || response.statusText, response.status, error.param);
}

export async function getJson(path) {
  return (await request(path)).json();
}

export async function postForm(path, form) {
  return (await request(path, { method: "POST", body: form })).json();
}

export const deleteAt = (path) => request(path, { method: "DELETE", keepalive: true });

async function* textLines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      yield* lines;
    }
    if (rest) yield rest;
  } finally {
    reader.cancel().catch(() => {});
  }
}

/**
 * The data of server-sent events: of a request with a `body`, or of one that only reads. Throws if the
 * stream ends before its last event.
 */
export async function* events(path, { body, headers = {}, signal }) {
  const posted = { method: "POST", body: JSON.stringify(body), headers: { "content-type": "application/json", ...headers } };
  const options = { ...(body ? posted : { headers }), signal };
  let isComplete = false;
  for await (const line of textLines(await request(path, options))) {
    if (!line.startsWith("data: ")) continue;
    const data = line.slice(6);
    if (data === "[DONE]") {
      isComplete = true;
      continue;
    }
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(event.error.message, 500, event.error.param);
    yield event;
  }
  if (!isComplete) throw new Error(T.connectionLost);
}

/** Lines of JSON, as `/debug/steps` sends them. */
export async function* jsonLines(path, signal) {
  for await (const line of textLines(await request(path, { signal }))) {
    if (line) yield JSON.parse(line);
  }
}
