// The state of the chat: the open conversation, the settings, and the answer that is generated. The
// components display it, and call its methods; `onChange` is called after each change.
import { events, getJson } from "./api.js";
import * as store from "./conversations.js";
import { T } from "./texts.js";

const SETTINGS = "quickstep.settings";
const TOP_LOGPROBS = 5;
const MAX_NEW_SEED = 2 ** 31;

export class Session {
  constructor(onChange) {
    this.onChange = onChange;
    this.conversation = store.newConversation();
    this.conversations = [];
    this.models = [];
    this.fields = {}; // what the user set, by the field's name in a request
    this.schema = null; // of the chat request, from /openapi.json
    this.model = "";
    this.isRaw = false;
    this.problem = null; // the last error, {message, param}
    this.generating = null; // {message, abort, progress}
    Object.assign(this, JSON.parse(localStorage.getItem(SETTINGS) || "{}"));
  }

  async load() {
    try {
      this.conversations = await store.storedConversations();
    } catch {
      this.conversations = []; // a private window may have no store
    }
    this.onChange();
    await this.connect();
  }

  /** Read the models and the fields of a request, again after the key has changed. */
  async connect() {
    try {
      const [models, document] = await Promise.all([getJson("v1/models"), getJson("openapi.json")]);
      this.models = models.data;
      this.schema = document.components.schemas.ChatRequest;
      this.problem = null;
    } catch (error) {
      this.problem = error;
    }
    this.onChange();
  }

  set(changes) {
    Object.assign(this, changes);
    const { fields, model, isRaw } = this;
    localStorage.setItem(SETTINGS, JSON.stringify({ fields, model, isRaw }));
    this.onChange();
  }

  get path() {
    return store.pathTo(this.conversation, this.conversation.leaf);
  }

  get contextLength() {
    const model = this.models.find((card) => card.id === this.model) ?? this.models[0];
    return model?.max_model_len ?? 0;
  }

  branchesOf(message) {
    return store.childrenOf(this.conversation, message.parent);
  }

  select(message) {
    store.selectBranch(this.conversation, message);
    this._save();
  }

  // conversations

  start() {
    this.stop();
    this.conversation = store.newConversation(this.conversation.system);
    this.onChange();
  }

  open(conversation) {
    this.stop();
    this.conversation = conversation;
    this.onChange();
  }

  async remove(conversation) {
    await store.deleteConversation(conversation.id);
    this.conversations = this.conversations.filter((item) => item.id !== conversation.id);
    if (this.conversation.id === conversation.id) this.start();
    this.onChange();
  }

  setSystem(system) {
    this.conversation.system = system;
    this._save();
  }

  import(text) {
    const conversation = JSON.parse(text);
    if (typeof conversation.messages !== "object") throw new Error(T.noJson);
    this.open({ ...store.newConversation(), ...conversation, id: store.newId() });
    this._save();
  }

  _save() {
    const { conversation } = this;
    conversation.changed = Date.now();
    this.conversations = [conversation, ...this.conversations.filter((item) => item.id !== conversation.id)];
    store.storeConversation(conversation).catch(() => {});
    this.onChange();
  }

  // messages

  send(text) {
    const message = store.addMessage(this.conversation, this.conversation.leaf, { role: "user", text });
    return this._answer(message.id, {});
  }

  /** A message of the user with another text, as a branch. */
  edit(message, text) {
    const edited = store.addMessage(this.conversation, message.parent, { role: "user", text });
    return this._answer(edited.id, {});
  }

  /** Another answer to the same message. */
  regenerate(message, seed) {
    return this._answer(message.parent, { seed });
  }

  /** The rest of an answer that was stopped or cut off, in the same message. */
  continue(message) {
    return this._answer(message.parent, { message, seed: message.seed });
  }

  /** A branch with the tokens before `place`, another item there, and what the model continues with. */
  branchAt(message, place, alternative) {
    const kept = message.tokens.slice(0, place);
    const tokens = [...kept, { ...alternative, top_logprobs: message.tokens[place].top_logprobs }];
    const bytes = tokens.flatMap((token) => token.bytes ?? []);
    const text = new TextDecoder().decode(new Uint8Array(bytes));
    const branch = store.addMessage(this.conversation, message.parent, {
      role: "assistant", text, tokens, reasoning: "", seed: message.seed,
    });
    return this._answer(message.parent, { message: branch, seed: message.seed });
  }

  stop() {
    this.generating?.abort.abort();
  }

  /** The body of the request for an answer to the messages up to `parent`, with `prefix` written. */
  body(parent, prefix = "", seed = this.fields.seed) {
    const path = store.pathTo(this.conversation, parent);
    const body = {
      ...(this.model && { model: this.model }),
      stream: true,
      stream_options: { include_usage: true },
      quickstep_timings: true,
      ...this.fields,
      ...(seed !== undefined && { seed }),
    };
    if (this.isRaw) {
      const prompt = path.map((message) => message.text).join("") + prefix;
      return { ...body, prompt, logprobs: TOP_LOGPROBS, max_tokens: body.max_tokens ?? 256 };
    }
    const messages = path.map(({ role, text }) => ({ role, content: text }));
    if (this.conversation.system) messages.unshift({ role: "system", content: this.conversation.system });
    if (prefix) messages.push({ role: "assistant", content: prefix });
    return {
      ...body, messages, logprobs: true, top_logprobs: TOP_LOGPROBS, return_progress: true,
      ...(prefix && { continue_final_message: true, add_generation_prompt: false }),
    };
  }

  get route() {
    return this.isRaw ? "v1/completions" : "v1/chat/completions";
  }

  async _answer(parent, { message, seed }) {
    this.stop();
    const chosen = seed ?? this.fields.seed ?? Math.floor(Math.random() * MAX_NEW_SEED);
    const body = this.body(parent, message?.text ?? "", chosen);
    const answer = message ?? store.addMessage(this.conversation, parent, {
      role: "assistant", text: "", reasoning: "", tokens: [],
    });
    Object.assign(answer, { seed: chosen, note: "", finish: null, figures: null });
    this.conversation.leaf = answer.id;
    const generating = { message: answer, abort: new AbortController(), progress: null };
    this.generating = generating;
    this.problem = null;
    this.onChange();
    const times = { sent: performance.now(), first: null, last: null, count: 0 };
    try {
      for await (const chunk of events(this.route, body, generating.abort.signal)) {
        this._read(chunk, answer, generating, times);
        this.onChange();
      }
      if (answer.finish === "length") answer.note = T.lengthLimit;
    } catch (error) {
      if (error.name === "AbortError") answer.note = T.stopped;
      else if (error.status && error.status < 500) this.problem = error;
      else answer.note = T.interrupted(error.message);
      if (this.problem) answer.note = error.message;
    }
    if (this.generating === generating) this.generating = null;
    answer.figures = { ...figuresOf(times), ...answer.figures };
    this._save();
  }

  _read(chunk, answer, generating, times) {
    answer.requestId = chunk.id;
    if (chunk.prompt_progress) generating.progress = chunk.prompt_progress;
    for (const choice of chunk.choices ?? []) {
      const delta = choice.delta ?? { content: choice.text };
      answer.text += delta.content ?? "";
      answer.reasoning += delta.reasoning_content ?? "";
      for (const call of delta.tool_calls ?? []) addToolCall(answer, call);
      const tokens = tokensOf(choice.logprobs);
      answer.tokens.push(...tokens);
      if (tokens.length || delta.content || delta.reasoning_content) {
        times.last = performance.now();
        times.first ??= times.last;
        times.count += tokens.length || 1;
      }
      answer.finish = choice.finish_reason ?? answer.finish;
    }
    if (chunk.usage) answer.usage = chunk.usage;
    if (chunk.quickstep) answer.figures = chunk.quickstep;
  }
}

function addToolCall(answer, { index, function: { name, arguments: text } }) {
  answer.toolCalls ??= [];
  const call = (answer.toolCalls[index] ??= { name: "", arguments: "" });
  call.name += name ?? "";
  call.arguments += text ?? "";
}

/** The tokens of a chunk, in chat's form. */
function tokensOf(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) return logprobs.content;
  const bytesOf = (token) => [...new TextEncoder().encode(token)];
  return logprobs.tokens.map((token, place) => ({
    token,
    bytes: bytesOf(token),
    logprob: logprobs.token_logprobs[place],
    top_logprobs: Object.entries(logprobs.top_logprobs?.[place] ?? {}).map(([other, logprob]) => ({
      token: other, logprob, bytes: bytesOf(other),
    })),
  }));
}

/** What this page measured: the times to the first token and per further token, in ms. */
function figuresOf({ sent, first, last, count }) {
  if (first === null) return {};
  const tpot = count > 1 ? (last - first) / (count - 1) : null;
  return { ttft_ms: first - sent, tpot_ms: tpot, num_tokens: count };
}
