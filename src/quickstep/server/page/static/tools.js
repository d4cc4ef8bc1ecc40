// Tools: their declarations in the settings, and results that the user writes by hand.
import { TextField, html, useState } from "./html.js";
import { T } from "./texts.js";

const EMPTY = { type: "object", properties: {} };
const INDENT = 1;

const declared = (tool) => ({ type: "function", function: tool });

/** The tools of a request; they are the field `tools`. */
export function Tools({ session }) {
  const tools = session.fields.tools ?? [];
  const set = (change) => { // of the tools now, which may be newer than those displayed
    const { tools: before = [], ...fields } = session.fields;
    const next = change(before);
    session.set({ fields: next.length ? { ...fields, tools: next } : fields });
  };
  const change = (place, changes) =>
    set((all) => all.map((tool, at) => (at === place ? declared({ ...tool.function, ...changes }) : tool)));
  const remove = (place) => set((all) => all.filter((_, at) => at !== place));
  const add = () => set((all) => [...all, declared({ name: T.newTool, description: "", parameters: EMPTY })]);
  const reported = session.problem?.param?.startsWith("tools") ? session.problem.message : "";
  return html`
    <details open=${tools.length > 0}>
      <summary>${T.tools}${tools.length > 0 && ` (${tools.length})`}</summary>
      ${tools.map((tool, place) => html`
        <${Tool} key=${place} tool=${tool.function} onChange=${(changes) => change(place, changes)}
          onRemove=${() => remove(place)} />`)}
      ${reported && html`<p class="problem">${reported}</p>`}
      <button type="button" onClick=${add}>${T.addTool}</button>
    </details>`;
}

function Tool({ tool, onChange, onRemove }) {
  const [problem, setProblem] = useState("");
  const read = (text) => {
    try {
      const parameters = JSON.parse(text);
      setProblem("");
      onChange({ parameters });
      return true;
    } catch {
      setProblem(T.noJson);
      return false;
    }
  };
  return html`
    <fieldset class="tool">
      <legend>${tool.name}</legend>
      <label>${T.toolName} <input value=${tool.name} onInput=${(event) => onChange({ name: event.target.value })} /></label>
      <label>${T.toolDescription}
        <input value=${tool.description ?? ""} onInput=${(event) => onChange({ description: event.target.value })} /></label>
      <label>${T.toolParameters}
        <${TextField} rows="5" aria-invalid=${problem ? "true" : null}
          value=${JSON.stringify(tool.parameters ?? EMPTY, null, INDENT)} onRead=${read} /></label>
      ${problem && html`<p class="problem">${problem}</p>`}
      <button type="button" class="small" onClick=${onRemove}>${T.removeTool(tool.name)}</button>
    </fieldset>`;
}

/** The calls of an answer, and, while nothing follows it, fields for what the tools return. */
export function ToolCalls({ message, session, isLast }) {
  const [results, setResults] = useState({});
  const send = (event) => {
    event.preventDefault();
    session.sendResults(message, message.toolCalls.map((_, place) => results[place] ?? ""));
  };
  return html`
    ${message.toolCalls.map((call) => html`<pre class="call">${call.name}(${call.arguments})</pre>`)}
    ${isLast && html`
      <form onSubmit=${send}>
        ${message.toolCalls.map((call, place) => html`
          <label>${T.resultOf(call.name)}
            <textarea rows="2" value=${results[place] ?? ""}
              onInput=${(event) => setResults({ ...results, [place]: event.target.value })}></textarea></label>`)}
        <button>${T.sendResults}</button>
      </form>`}`;
}
