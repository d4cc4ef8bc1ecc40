// The fields of a request, from the schema of the server: names, bounds, defaults and descriptions
// are those of /openapi.json. Fields of several values are written as JSON.
import { TextField, html, useState } from "./html.js";
import { T } from "./texts.js";

// what the chat sets itself, and what has an editor of its own
const OWN = new Set([
  "tools", "messages", "model", "stream", "stream_options", "quickstep_timings", "logprobs", "top_logprobs",
  "continue_final_message", "add_generation_prompt", "return_progress", "n", "echo", "use_beam_search",
]);
const FIRST = [
  "preset", "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "repetition_penalty",
  "presence_penalty", "frequency_penalty", "json_schema", "grammar", "stop", "tool_choice",
  "reasoning_effort",
];

export function Settings({ session }) {
  const [filter, setFilter] = useState("");
  if (!session.schema) return null;
  const properties = Object.entries(session.schema.properties).filter(
    ([name, field]) => !OWN.has(name) && ["honoured", "hint"].includes(field["x-class"]),
  );
  const known = new Map(properties);
  const first = FIRST.filter((name) => known.has(name));
  const others = [...known.keys()].filter(
    (name) => !FIRST.includes(name) && (name.includes(filter) || name in session.fields),
  );
  const field = (name) => html`<${Field} key=${name} name=${name} schema=${known.get(name)} session=${session} />`;
  return html`
    <fieldset>
      <legend>${T.sampling}</legend>
      ${first.map(field)}
      <button type="button" onClick=${() => session.set({ fields: {} })}>${T.reset}</button>
    </fieldset>
    <details>
      <summary>${T.allFields}</summary>
      <input type="search" aria-label=${T.filterFields} placeholder=${T.filterFields} value=${filter}
        onInput=${(event) => setFilter(event.target.value)} />
      ${others.map(field)}
    </details>`;
}

/** The forms that a field may have, null left out. */
const formsOf = (schema) =>
  (schema.anyOf ?? [schema]).flatMap((form) => form.anyOf ?? [form]).filter((form) => form.type !== "null");

function Field({ name, schema, session }) {
  const [problem, setProblem] = useState("");
  const value = session.fields[name];
  const forms = formsOf(schema);
  const number = forms.length === 1 && forms.find((form) => form.type === "number" || form.type === "integer");
  const choices = forms.flatMap((form) => form.enum ?? form.examples ?? []);
  const id = `field-${name}`;
  const change = (next) => {
    const fields = { ...session.fields };
    if (next === undefined) delete fields[name];
    else fields[name] = next;
    session.set({ fields });
  };
  const standard = schema["x-default"];
  const placeholder = standard === undefined ? T.serverDefault : T.defaultOf(JSON.stringify(standard));
  const reported = session.problem?.param?.split(/[.[]/)[0] === name ? session.problem.message : problem;
  const shared = {
    id, placeholder, "aria-describedby": `${id}-help`, "aria-invalid": reported ? "true" : null,
  };
  let input;
  if (choices.length || (forms.length === 1 && forms[0].type === "boolean")) {
    const options = choices.length ? choices : [true, false];
    input = html`<select ...${shared} value=${JSON.stringify(value ?? null)}
      onChange=${(event) => change(JSON.parse(event.target.value) ?? undefined)}>
      <option value="null">${placeholder}</option>
      ${options.map((option) => html`<option value=${JSON.stringify(option)}>${String(option)}</option>`)}
    </select>`;
  } else if (number) {
    input = html`<input type="number" ...${shared} value=${value ?? ""}
      min=${number.minimum ?? number.exclusiveMinimum} max=${number.maximum ?? number.exclusiveMaximum}
      step=${number.type === "integer" ? 1 : "any"}
      onInput=${(event) => change(event.target.value === "" ? undefined : Number(event.target.value))} />`;
  } else {
    const takesText = forms.some((form) => form.type === "string");
    const read = (text) => {
      setProblem("");
      if (text.trim() === "") return change(undefined);
      try {
        return change(JSON.parse(text));
      } catch {
        if (takesText) return change(text);
        setProblem(T.noJson);
        return false;
      }
    };
    const text = value === undefined || typeof value === "string" ? (value ?? "") : JSON.stringify(value, null, 1);
    input = html`<${TextField} rows="1" ...${shared} value=${text} onRead=${read} />`;
  }
  return html`
    <div class="field">
      <label for=${id} title=${schema.description}>${name}</label>
      ${input}
      <small id="${id}-help" class=${reported ? "problem" : "hidden"}>${reported || schema.description}</small>
    </div>`;
}
