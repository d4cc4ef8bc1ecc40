// The chat: conversations, messages, the field for the next item, and the settings.
import { TextField, html, useEffect, useLayoutEffect, useRef, useState } from "./html.js";
import { apiKey, getJson } from "./api.js";
import { Attachments, attached, contentOf } from "./attachments.js";
import { codeOf } from "./code.js";
import { fragmentOf } from "./markdown.js";
import { Settings } from "./settings.js";
import { T } from "./texts.js";
import { Tokens } from "./tokens.js";
import { ToolCalls, Tools } from "./tools.js";

export function Chat({ session }) {
  const [hasSettings, setHasSettings] = useState(window.innerWidth > 1000);
  return html`
    <div class="chat ${hasSettings ? "with-settings" : ""}">
      <${Conversations} session=${session} />
      <div class="talk">
        <${Messages} session=${session} />
        <${NextMessage} session=${session} />
      </div>
      <section class="settings" aria-label=${T.settings}>
        <button type="button" class="toggle" aria-expanded=${String(hasSettings)}
          onClick=${() => setHasSettings(!hasSettings)}>${T.settings}</button>
        ${hasSettings && html`<${Panel} session=${session} />`}
      </section>
    </div>`;
}

function Conversations({ session }) {
  const [filter, setFilter] = useState("");
  const wanted = filter.toLowerCase();
  const matches = (item) =>
    !wanted || item.title.toLowerCase().includes(wanted) ||
    Object.values(item.messages).some((message) => message.text.toLowerCase().includes(wanted));
  const open = async (event) => {
    const [file] = event.target.files;
    if (!file) return;
    try {
      session.import(await file.text());
    } catch (error) {
      session.set({ problem: error });
    }
    event.target.value = "";
  };
  return html`
    <nav class="conversations" aria-label=${T.conversations}>
      <button type="button" onClick=${() => session.start()}>${T.newChat}</button>
      <input type="search" aria-label=${T.search} placeholder=${T.search} value=${filter}
        onInput=${(event) => setFilter(event.target.value)} />
      <ul>
        ${session.conversations.filter(matches).map((item) => html`
          <li key=${item.id} class=${item.id === session.conversation.id ? "current" : ""}>
            <button type="button" class="title" onClick=${() => session.open(item)}>${item.title || T.untitled}</button>
            <button type="button" class="small" aria-label="${T.remove}: ${item.title}" title=${T.remove}
              onClick=${() => session.remove(item)}>×</button>
          </li>`)}
      </ul>
      ${apiKey() && html`<label><input type="checkbox" checked=${session.isSynced}
        onChange=${(event) => session.setSynced(event.target.checked)} /> ${T.onServer}</label>`}
      <button type="button" onClick=${() => saveFile(session.conversation)}>${T.exportChat}</button>
      <label class="button">${T.importChat}
        <input type="file" accept=".json,application/json" onChange=${open} /></label>
    </nav>`;
}

function saveFile(conversation) {
  const content = new Blob([JSON.stringify(conversation, null, 1)], { type: "application/json" });
  const link = document.createElement("a");
  link.href = URL.createObjectURL(content);
  link.download = `${(conversation.title || "conversation").replace(/[^\w-]+/g, "-")}.json`;
  link.click();
  URL.revokeObjectURL(link.href);
}

function Messages({ session }) {
  const list = useRef(null);
  const follows = useRef(true);
  useLayoutEffect(() => {
    if (follows.current) list.current.scrollTop = list.current.scrollHeight;
  });
  const onScroll = ({ target }) => {
    follows.current = target.scrollHeight - target.scrollTop - target.clientHeight < 60;
  };
  const path = session.path;
  return html`
    <div class="messages" ref=${list} onScroll=${onScroll} tabindex="0" role="log" aria-label=${T.chat}>
      ${path.length === 0 && html`<p class="note">${T.emptyChat}</p>`}
      ${path.map((message) => html`<${Message} key=${message.id} message=${message} session=${session} />`)}
      ${session.problem && html`<p class="problem" role="alert">${session.problem.message}</p>`}
    </div>`;
}

function Message({ message, session }) {
  const [edited, setEdited] = useState(null);
  const [showsTokens, setShowsTokens] = useState(false);
  const isGenerating = session.generating?.message === message;
  const isAnswer = message.role === "assistant";
  const name = message.role === "tool" ? T.resultOf(message.name) : isAnswer ? T.assistant : T.you;
  const hasCalls = message.toolCalls?.length > 0;
  return html`
    <article class="message ${message.role}" aria-busy=${String(isGenerating)} aria-label=${name}>
      <header><strong>${name}</strong><${Branches} message=${message} session=${session} /></header>
      ${message.reasoning && html`
        <details open=${isGenerating && !message.text}>
          <summary>${T.reasoning}</summary><${Markdown} text=${message.reasoning} />
        </details>`}
      ${edited !== null && html`
        <form onSubmit=${(event) => { event.preventDefault(); session.edit(message, edited); setEdited(null); }}>
          <textarea aria-label=${T.edit} rows="4" value=${edited} onInput=${(event) => setEdited(event.target.value)}></textarea>
          <button>${T.save}</button>
          <button type="button" onClick=${() => setEdited(null)}>${T.cancel}</button>
        </form>`}
      ${edited === null && (isAnswer
        ? showsTokens ? html`<${Tokens} message=${message} session=${session} />` : html`<${Markdown} text=${message.text} />`
        : html`<div class="text">${message.text}</div>`)}
      <${Attachments} attachments=${message.attachments} />
      ${hasCalls && html`<${ToolCalls} message=${message} session=${session}
        isLast=${!isGenerating && session.conversation.leaf === message.id} />`}
      ${isGenerating && !message.text && html`<p class="note">${progressText(session.generating.progress)}</p>`}
      ${message.note && html`<p class="note" role="status">${message.note}</p>`}
      ${isAnswer && !isGenerating && html`<${Figures} message=${message} />`}
      <footer>
        ${!isGenerating && html`
          <button type="button" onClick=${() => navigator.clipboard?.writeText(contentOf(message))}>${T.copy}</button>
          ${isAnswer && html`
            <button type="button" onClick=${() => session.regenerate(message, message.seed)}>${T.sameSeed}</button>
            <button type="button" onClick=${() => session.regenerate(message, message.seed + 1)}>${T.nextSeed}</button>
            ${!hasCalls && html`<button type="button" onClick=${() => session.continue(message)}>${T.continueAnswer}</button>`}
            <button type="button" aria-pressed=${String(showsTokens)} onClick=${() => setShowsTokens(!showsTokens)}>${T.tokens}</button>`}
          ${!isAnswer && html`<button type="button" onClick=${() => setEdited(message.text)}>${T.edit}</button>`}`}
      </footer>
    </article>`;
}

const progressText = (progress) =>
  progress ? T.readingPrompt(progress.processed, progress.total) : T.waiting;

function Branches({ message, session }) {
  const branches = session.branchesOf(message);
  if (branches.length < 2) return null;
  const place = branches.indexOf(message);
  return html`
    <span class="branches">
      <button type="button" class="small" aria-label=${T.previous} disabled=${place === 0}
        onClick=${() => session.select(branches[place - 1])}>‹</button>
      ${T.branch(place + 1, branches.length)}
      <button type="button" class="small" aria-label=${T.next} disabled=${place === branches.length - 1}
        onClick=${() => session.select(branches[place + 1])}>›</button>
    </span>`;
}

function Markdown({ text }) {
  const element = useRef(null);
  useLayoutEffect(() => element.current.replaceChildren(fragmentOf(text)), [text]);
  return html`<div class="markdown" ref=${element}></div>`;
}

function Figures({ message }) {
  const [why, setWhy] = useState("");
  const figures = message.figures;
  if (!figures?.num_tokens) return null;
  const cost = figures.cost_by_tokens_usd;
  const drafts = figures.sequences?.reduce((sum, item) => sum + item.num_drafts, 0);
  const accepted = figures.sequences?.reduce((sum, item) => sum + item.num_accepted, 0);
  const items = [
    [T.ttft, `${figures.ttft_ms.toFixed(0)} ms`],
    figures.tpot_ms !== null && [T.tpot, `${figures.tpot_ms.toFixed(1)} ms`],
    // without a speed if all came at once
    figures.tpot_ms >= 0.05 && [T.speed, T.tokensPerSecond((1e3 / figures.tpot_ms).toFixed(1))],
    [T.tokens, message.usage?.completion_tokens ?? figures.num_tokens],
    figures.device_s !== undefined && [T.deviceTime, `${figures.device_s.toFixed(3)} s`],
    figures.cached_tokens > 0 && [T.cached, T.outputTokens(figures.cached_tokens)],
    drafts > 0 && [T.drafts, `${accepted}/${drafts}`],
    cost !== null && cost !== undefined && [T.cost, `$${cost.toPrecision(3)}`],
    [T.seed, message.seed],
  ].filter(Boolean);
  const explain = async () => {
    try {
      const explained = await getJson(`debug/requests/${encodeURIComponent(message.requestId)}`);
      setWhy(explained.sequences.map((item) => item.sentence).join(" "));
    } catch (error) {
      setWhy(error.message);
    }
  };
  return html`
    <dl class="figures">
      ${items.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}
    </dl>
    <button type="button" class="small" onClick=${explain}>${T.why}</button>
    ${why && html`<p class="note">${why}</p>`}`;
}

function NextMessage({ session }) {
  const [text, setText] = useState("");
  const [files, setFiles] = useState([]);
  const field = useRef(null);
  const isEmpty = !text && !files.length;
  const submit = (event) => {
    event.preventDefault();
    if (session.generating || isEmpty) return;
    session.send(text, files);
    setText("");
    setFiles([]);
  };
  const attach = async (event) => {
    try {
      const more = await attached(event.target.files);
      setFiles([...files, ...more]);
    } catch (error) {
      session.set({ problem: error });
    }
    event.target.value = "";
  };
  const onKey = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  };
  useEffect(() => field.current.focus(), [session.conversation.id]);
  const last = session.path.findLast((message) => message.usage);
  return html`
    <form class="next" onSubmit=${submit}>
      <textarea ref=${field} rows="3" aria-label=${T.message} value=${text}
        placeholder=${session.isRaw ? T.promptPlaceholder : T.messagePlaceholder}
        onInput=${(event) => setText(event.target.value)} onKeyDown=${onKey}></textarea>
      <label class="button">${T.attach}<input type="file" multiple onChange=${attach} /></label>
      ${session.generating
        ? html`<button type="button" onClick=${() => session.stop()}>${T.stop}</button>`
        : html`<button class="main" disabled=${isEmpty}>${T.send}</button>`}
      <${Attachments} attachments=${files} onRemove=${(place) => setFiles(files.filter((_, at) => at !== place))} />
      ${last && html`
        <label class="context">${T.context}
          <meter min="0" max=${session.contextLength} value=${last.usage.total_tokens}></meter>
          ${last.usage.total_tokens} / ${session.contextLength}</label>`}
    </form>`;
}

function Panel({ session }) {
  const [language, setLanguage] = useState("");
  const code = language && codeOf(language, session.route, session.body(session.conversation.leaf), Boolean(apiKey()));
  const languages = [["curl", T.curl], ["python", T.python], ["javascript", T.javascript]];
  return html`
    <label>${T.model}
      <select value=${session.model || session.models[0]?.id} onFocus=${() => session.connect()} onChange=${(event) => session.set({ model: event.target.value })}>
        ${session.models.length === 0 && html`<option value="">${T.noModels}</option>`}
        ${session.models.map((model) => html`
          <option value=${model.id}>${model.status ? T.modelState(model.id, model.status.state) : model.id}</option>`)}
      </select></label>
    <label><input type="checkbox" checked=${session.isRaw}
      onChange=${(event) => session.set({ isRaw: event.target.checked })} /> ${T.raw}</label>
    <label>${T.system}
      <${TextField} rows="3" value=${session.conversation.system} onRead=${(text) => session.setSystem(text)} /></label>
    <${Tools} session=${session} />
    <${Settings} session=${session} />
    <fieldset>
      <legend>${T.exportCode}</legend>
      ${languages.map(([id, name]) => html`
        <button type="button" aria-pressed=${String(language === id)}
          onClick=${() => setLanguage(language === id ? "" : id)}>${name}</button>`)}
      ${code && html`
        <button type="button" onClick=${() => navigator.clipboard?.writeText(code)}>${T.copy}</button>
        <pre tabindex="0">${code}</pre>`}
    </fieldset>`;
}
