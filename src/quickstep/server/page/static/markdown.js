// A model's output as HTML. The output is data: HTML in it is displayed as text, DOMPurify leaves
// only elements of text, nothing that loads, submits or styles, and the page's policy would refuse to
// run or load the rest.
import { formulas, replaceFormulas } from "./math.js";
import { Marked } from "./vendor/marked.js";
import DOMPurify from "./vendor/purify.js";
import hljs from "./vendor/highlight.js";
import bash from "./vendor/highlight-bash.js";
import c from "./vendor/highlight-c.js";
import cpp from "./vendor/highlight-cpp.js";
import css from "./vendor/highlight-css.js";
import go from "./vendor/highlight-go.js";
import java from "./vendor/highlight-java.js";
import javascript from "./vendor/highlight-javascript.js";
import json from "./vendor/highlight-json.js";
import python from "./vendor/highlight-python.js";
import rust from "./vendor/highlight-rust.js";
import sql from "./vendor/highlight-sql.js";
import typescript from "./vendor/highlight-typescript.js";
import xml from "./vendor/highlight-xml.js";
import yaml from "./vendor/highlight-yaml.js";

const LANGUAGES = {
  bash, c, cpp, css, go, java, javascript, json, python, rust, sql, typescript, xml, yaml,
};
for (const [name, grammar] of Object.entries(LANGUAGES)) hljs.registerLanguage(name, grammar);

const ESCAPES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
const escaped = (text) => text.replace(/[&<>"]/g, (char) => ESCAPES[char]);
const marked = new Marked({
  extensions: formulas(escaped),
  gfm: true,
  breaks: true,
  renderer: { html: ({ text }) => escaped(text), image: ({ href, text }) => escaped(`![${text}](${href})`) },
});

const RULES = {
  RETURN_DOM_FRAGMENT: true,
  ALLOWED_TAGS: [
    "a", "b", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "i",
    "li", "ol", "p", "pre", "strong", "sub", "sup", "table", "tbody", "td", "th", "thead", "tr", "ul",
  ],
  ALLOWED_ATTR: ["href", "class", "start"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
};

/** A fragment of the document for a text in Markdown. */
export function fragmentOf(text) {
  const fragment = DOMPurify.sanitize(marked.parse(text), RULES);
  replaceFormulas(fragment);
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const element of fragment.querySelectorAll("[class]")) {
    const language = /^language-(\w+)$/.exec(element.className)?.[1];
    element.removeAttribute("class");
    if (element.tagName === "CODE" && hljs.getLanguage(language ?? "")) {
      element.innerHTML = hljs.highlight(element.textContent, { language }).value;
    }
  }
  return fragment;
}
