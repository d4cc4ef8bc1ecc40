// Formulas in TeX, between $ and $, $$ and $$, \( and \) or \[ and \], as MathML.
import temml from "./vendor/temml.js";
import DOMPurify from "./vendor/purify.js";

const MAX_CHARS = 4000;
const MAX_KEPT = 500;
// the page's policy refuses style attributes, even in what is parsed only
const STYLE = / style="[^"]*"/g;
const OPTIONS = { throwOnError: true, trust: false, strict: false, maxExpand: 200 };
const kept = new Map(); // by TeX: an answer is displayed again with each of its tokens

const BLOCK = /^(?:\$\$([\s\S]+?)\$\$|\\\[([\s\S]+?)\\\])/;
// no space inside of single $, no digit after them: prices are no formulas
const INLINE = /^(?:\\\(([\s\S]+?)\\\)|\$(?![\s$])((?:\\[\s\S]|[^\\$\n])*?[^\s\\$])\$(?!\d))/;

const token = (type, match) => match && { type, raw: match[0], text: (match[1] ?? match[2]).trim() };

/** Extensions of marked: a formula becomes `code` with the class `math` or `math block`. */
export const formulas = (escaped) => [
  {
    name: "mathBlock", level: "inline",
    start: (text) => text.match(/\$\$|\\\[/)?.index,
    tokenizer: (text) => token("mathBlock", BLOCK.exec(text)),
    renderer: ({ text }) => `<code class="math block">${escaped(text)}</code>`,
  },
  {
    name: "math", level: "inline",
    start: (text) => text.match(/\$|\\\(/)?.index,
    tokenizer: (text) => token("math", INLINE.exec(text)),
    renderer: ({ text }) => `<code class="math">${escaped(text)}</code>`,
  },
];

function mathOf(tex, isBlock) {
  const key = `${isBlock} ${tex}`;
  if (!kept.has(key)) {
    if (kept.size > MAX_KEPT) kept.clear();
    kept.set(key, temml.renderToString(tex, { ...OPTIONS, displayMode: isBlock }).replace(STYLE, ""));
  }
  return DOMPurify.sanitize(kept.get(key), { USE_PROFILES: { mathMl: true }, RETURN_DOM_FRAGMENT: true });
}

/** Replace the formulas of a fragment; what is no TeX stays as it was written. */
export function replaceFormulas(fragment) {
  for (const element of fragment.querySelectorAll("code.math")) {
    const tex = element.textContent;
    if (tex.length > MAX_CHARS) continue;
    try {
      element.replaceWith(mathOf(tex, element.classList.contains("block")));
    } catch {
      // it stays as code
    }
  }
}
