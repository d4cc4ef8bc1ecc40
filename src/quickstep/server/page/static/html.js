// Preact with htm: components are written as templates, without a build step.
import { h, render } from "./vendor/preact.js";
import { useState } from "./vendor/preact-hooks.js";
import htm from "./vendor/htm.js";

export { render };
export * from "./vendor/preact-hooks.js";
export const html = htm.bind(h);

/**
 * A text area, or another element `as`, whose text is read when it is left. What is typed until then, and
 * what `onRead` refuses by returning false, stays, however often the page is drawn.
 */
export function TextField({ as = "textarea", value, onRead, ...props }) {
  const [draft, setDraft] = useState(null);
  const read = ({ target }) => setDraft(onRead(target.value) === false ? target.value : null);
  return html`<${as} ...${props} value=${draft ?? value}
    onInput=${({ target }) => setDraft(target.value)} onChange=${read} />`;
}
