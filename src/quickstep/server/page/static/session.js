// The state of the chat: the open conversation, the settings, and the answer that is generated. The
// components display it, and call its methods; `onChange` is called after each change.
import { apiKey, deleteAt, events, getJson } from "./api.js";
import { contentOf } from "./attachments.js";
import * as store from "./conversations.js";
import { removeThere, synchronize, upload } from "./sync.js";
import { T } from "./texts.js";

const SETTINGS = "quickstep.settings";
const TOP_LOGPROBS = 5;
const MAX_NEW_SEED = 2 ** 31;
const CONVERSATION_HEADER = "x-conversation-id";

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
    this.isSynced = false; // conversations are on the server too
    this.problem = null; // the last error, {message, param}
    this.generating = null; // {message, abort, progress, isLeft}
    this._ending = null; // a request to end an answer
    addEventListener("pagehide", () => this._leave());
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
    const unfinished = this.conversations.find(store.unfinished);
    if (unfinished && !this.path.length) this.open(unfinished);
  }

  /** Read the models, again after the key has changed, and the fields of a request. */
  async connect() {
    try {
      const [models, document] = await Promise.all([getJson("v1/models"), this.schema || getJson("openapi.json")]);
      this.models = models.data;
      this.schema ||= document.components.schemas.ChatRequest;
      this.problem = null;
      await this._synchronize();
    } catch (error) {
      this.problem = error;
    }
    this.onChange();
  }

  set(changes) {
    Object.assign(this, changes);
    const { fields, model, isRaw, isSynced } = this;
    localStorage.setItem(SETTINGS, JSON.stringify({ fields, model, isRaw, isSynced }));
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
    this._leave();
    this.conversation = store.newConversation(this.conversation.system);
    this.onChange();
  }

  open(conversation) {
    this._leave();
    this.conversation = conversation;
    this.onChange();
    const answer = store.unfinished(conversation);
    if (answer) this._follow(answer, (signal) => this._again(answer, signal));
  }

  /** Keep conversations on the server too, or no more. */
  setSynced(isSynced) {
    this.set({ isSynced });
    this.connect();
  }

  /** Without a key there is nobody whose conversations they would be. */
  get _isSyncing() {
    return this.isSynced && Boolean(apiKey());
  }

  async _synchronize() {
    if (!this._isSyncing) return;
    const { newer, removed } = await synchronize(this.conversations);
    for (const { id } of removed) await store.deleteConversation(id);
    for (const conversation of newer) await store.storeConversation(conversation);
    const changed = new Set([...newer, ...removed].map(({ id }) => id));
    const kept = this.conversations.filter(({ id }) => !changed.has(id));
    this.conversations = [...kept, ...newer].sort((a, b) => b.changed - a.changed);
    const current = newer.find(({ id }) => id === this.conversation.id);
    if (current && !this.generating) this.conversation = current;
  }

  async remove(conversation) {
    if (this._isSyncing) removeThere(conversation).catch((problem) => this.set({ problem }));
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
    const isUploaded = this._isSyncing && !store.unfinished(conversation);
    if (isUploaded) conversation.isOnServer = true;
    store.storeConversation(conversation).catch(() => {});
    if (isUploaded) upload(conversation).catch((problem) => this.set({ problem }));
    this.onChange();
  }

  // messages

  send(text, attachments) {
    const fields = { role: "user", text, ...(attachments?.length && { attachments }) };
    return this._answer(store.addMessage(this.conversation, this.conversation.leaf, fields).id, {});
  }

  /** A message with another text, as a branch. */
  edit(message, text) {
    const { role, attachments, callId, name } = message;
    const edited = store.addMessage(this.conversation, message.parent, { role, text, attachments, callId, name });
    return this._answer(edited.id, {});
  }

  /** What the tools returned that an answer called, in the order of its calls. */
  sendResults(message, results) {
    let parent = message.id;
    message.toolCalls.forEach((call, place) => {
      const fields = { role: "tool", text: results[place], callId: call.id, name: call.name };
      parent = store.addMessage(this.conversation, parent, fields).id;
    });
    return this._answer(parent, {});
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
    if (!this.generating) return;
    this._ending = deleteAt(this._stream).catch(() => {});
    this.generating.abort.abort();
  }

  /** Read no more; the server goes on, and `open` reads what it has kept. */
  _leave() {
    if (!this.generating) return;
    this.generating.isLeft = true;
    this.generating.abort.abort();
  }

  /** Where the server keeps the answer that is generated, for clients that were cut off. */
  get _stream() {
    return `v1/stream/${encodeURIComponent(this._streamName)}`;
  }

  get _streamName() {
    return `page-${this.conversation.id}`;
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
    const messages = path.map(asSent);
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
    this.generating?.abort.abort(); // the server ends it when the next request of the conversation comes
    const chosen = seed ?? this.fields.seed ?? Math.floor(Math.random() * MAX_NEW_SEED);
    const body = this.body(parent, message?.text ?? "", chosen);
    const answer = message ?? store.addMessage(this.conversation, parent, {
      role: "assistant", text: "", reasoning: "", tokens: [],
    });
    const before = { text: answer.text, reasoning: answer.reasoning, numTokens: answer.tokens.length };
    Object.assign(answer, { seed: chosen, note: "", finish: null, figures: null, before });
    this.conversation.leaf = answer.id;
    this.problem = null;
    const following = this._follow(answer, (signal) => this._first(body, signal));
    this._save(); // a page that is loaded again finds that the answer has begun
    return following;
  }

  /** Read an answer to its end; again from its start if the connection breaks. */
  async _follow(answer, open) {
    const generating = { message: answer, abort: new AbortController(), progress: null, isLeft: false };
    const { signal } = generating.abort;
    this.generating = generating;
    this.onChange();
    const times = { sent: performance.now(), first: null, last: null, count: 0 };
    const read = async (chunks) => {
      for await (const chunk of chunks) {
        this._read(chunk, answer, generating, times);
        this.onChange();
      }
    };
    try {
      try {
        await read(open(signal));
      } catch (lost) {
        if (lost.status || signal.aborted) throw lost;
        await read(this._again(answer, signal)).catch(() => { throw lost; });
      }
      if (answer.finish === "length") answer.note = T.lengthLimit;
    } catch (error) {
      if (generating.isLeft) {
        if (this.generating === generating) this.generating = null;
        return;
      }
      if (signal.aborted) answer.note = T.stopped;
      else if (error.status && error.status < 500) this.problem = error;
      else answer.note = T.interrupted(error.message);
      if (this.problem) answer.note = error.message;
    }
    if (this.generating === generating) this.generating = null;
    delete answer.before;
    answer.figures = { ...figuresOf(times), ...answer.figures };
    this._save();
  }

  async *_first(body, signal) {
    await this._ending; // it names the same stream
    yield* events(this.route, { body, headers: { [CONVERSATION_HEADER]: this._streamName }, signal });
  }

  /** The chunks of an answer that the server has kept, from the first on. */
  async *_again(answer, signal) {
    let isFirst = true;
    for await (const chunk of events(`${this._stream}?from=0`, { signal })) {
      if (isFirst) store.resetAnswer(answer);
      isFirst = false;
      yield chunk;
    }
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
      if (choice.draft) for (const token of tokens) token.isDraft = true;
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

/** A message in the form of a request. */
function asSent(message) {
  const sent = { role: message.role, content: contentOf(message) };
  if (message.callId !== undefined) sent.tool_call_id = message.callId;
  if (message.toolCalls?.length) {
    sent.tool_calls = message.toolCalls.map(({ id, name, arguments: text }) => ({
      id, type: "function", function: { name, arguments: text },
    }));
  }
  return sent;
}

function addToolCall(answer, { index, id, function: { name, arguments: text } }) {
  answer.toolCalls ??= [];
  const call = (answer.toolCalls[index] ??= { id: "", name: "", arguments: "" });
  call.id ||= id ?? "";
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
