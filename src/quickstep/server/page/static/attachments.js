// Text files that go with a message: they are written below it, each in a block with its name.
import { html } from "./html.js";
import { T } from "./texts.js";

const MAX_BYTES = 2 ** 20;

/** The files with their texts. Throws for one that is too large or no text. */
export function attached(files) {
  return Promise.all([...files].map(async (file) => {
    if (file.size > MAX_BYTES) throw new Error(T.fileTooLarge(file.name));
    const text = new TextDecoder("utf-8", { fatal: true });
    try {
      const content = text.decode(await file.arrayBuffer());
      if (content.includes("\0")) throw new Error();
      return { name: file.name, text: content };
    } catch {
      throw new Error(T.fileNoText(file.name));
    }
  }));
}

/** What the model reads of a message: its text, then its files. */
export function contentOf({ text, attachments = [] }) {
  const blocks = attachments.map((file) => {
    const runs = file.text.match(/`{3,}/g) ?? [];
    const fence = "`".repeat(Math.max(2, ...runs.map((run) => run.length)) + 1);
    return `${file.name}:\n${fence}\n${file.text}\n${fence}`;
  });
  return [...(text ? [text] : []), ...blocks].join("\n\n");
}

export function Attachments({ attachments, onRemove }) {
  if (!attachments?.length) return null;
  return html`
    <ul class="attachments" aria-label=${T.attachments}>
      ${attachments.map((file, place) => html`
        <li key=${place}>
          <details><summary>${T.fileWithSize(file.name, file.text.length)}</summary><pre tabindex="0">${file.text}</pre></details>
          ${onRemove && html`<button type="button" class="small" aria-label="${T.remove}: ${file.name}"
            onClick=${() => onRemove(place)}>×</button>`}
        </li>`)}
    </ul>`;
}
