// The page: its tabs, the API key, and light or dark.
import { TextField, html, render, useEffect, useReducer, useState } from "./html.js";
import { apiKey, setApiKey } from "./api.js";
import { Chat } from "./chat.js";
import { embedded } from "./records.js";
import { Runs } from "./runs.js";
import { Session } from "./session.js";
import { T } from "./texts.js";
import { Timeline } from "./timeline.js";

const THEME = "quickstep.theme";

function Page({ session, report }) {
  const [, redraw] = useReducer((count) => count + 1, 0);
  const [tab, setTab] = useState(report ? "runs" : location.hash.slice(1) || "chat");
  useEffect(() => {
    if (report) return undefined;
    let isPending = false;
    session.onChange = () => {
      if (isPending) return;
      isPending = true;
      requestAnimationFrame(() => {
        isPending = false;
        redraw();
      });
    };
    session.load();
    const onHash = () => setTab(location.hash.slice(1) || "chat");
    addEventListener("hashchange", onHash);
    return () => removeEventListener("hashchange", onHash);
  }, []);
  const choose = (name) => {
    if (!report) location.hash = name;
    setTab(name);
  };
  const all = [["runs", T.runs], ["chat", T.chat], ["timeline", T.timeline]];
  const names = !report ? ["chat", "timeline"] : report.runs.length ? ["runs", "timeline"] : ["runs"];
  const tabs = all.filter(([name]) => names.includes(name));
  return html`
    <header class="bar">
      <h1>${report?.title ?? T.title}</h1>
      <div role="tablist">
        ${tabs.map(([name, label]) => html`
          <button type="button" role="tab" id="tab-${name}" aria-selected=${String(tab === name)} aria-controls="panel"
            onClick=${() => choose(name)}>${label}</button>`)}
      </div>
      ${!report && html`
        <a href="docs">${T.apiPage}</a>
        <label class="key">${T.apiKey}
          <${TextField} as="input" type="password" autocomplete="off" placeholder=${T.apiKeyHint} value=${apiKey()}
            onRead=${(key) => { setApiKey(key); session.connect(); }} /></label>`}
      <button type="button" onClick=${switchTheme}>${T.theme}</button>
    </header>
    <main><div id="panel" role="tabpanel" aria-labelledby="tab-${tab}">
      ${tab === "timeline" ? html`<${Timeline} report=${report} />`
        : tab === "runs" && report ? html`<${Runs} report=${report} />` : html`<${Chat} session=${session} />`}
    </div></main>`;
}

function switchTheme() {
  const root = document.documentElement;
  const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  const current = root.dataset.theme ?? (isDark ? "dark" : "light");
  root.dataset.theme = current === "dark" ? "light" : "dark";
  try {
    localStorage.setItem(THEME, root.dataset.theme);
  } catch {
    // a file may have no storage
  }
  dispatchEvent(new Event("themechange"));
}

async function start() {
  const report = await embedded();
  try {
    const theme = localStorage.getItem(THEME);
    if (theme) document.documentElement.dataset.theme = theme;
  } catch {
    // a file may have no storage
  }
  const session = report ? null : new Session(() => {});
  const root = document.getElementById("page");
  root.replaceChildren();
  render(html`<${Page} session=${session} report=${report} />`, root);
}

start();
