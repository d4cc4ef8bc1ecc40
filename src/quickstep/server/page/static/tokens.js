// The tokens of an answer with their probabilities and alternatives.
import { html, useState } from "./html.js";
import { T } from "./texts.js";

const displayText = (token) => token.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥") || "∅";
const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;

/** The class of a token's colour: `p0` for the most probable, `p5` for the least. */
function level(logprob) {
  if (logprob === null || logprob === undefined) return "";
  return `p${Math.min(5, Math.floor(-logprob / 0.7))}`;
}

export function Tokens({ message, session }) {
  const [place, setPlace] = useState(null);
  if (!message.tokens?.length) return html`<p class="note">${T.noTokens}</p>`;
  const selected = place === null ? null : message.tokens[place];
  return html`
    <p class="note">${T.tokenHint}</p>
    <div class="tokens">
      ${message.tokens.map((token, index) => html`
        <button type="button" key=${index} aria-pressed=${String(index === place)}
          class="token ${level(token.logprob)} ${token.isDraft ? "draft" : ""}"
          title=${[token.logprob !== null && percent(token.logprob), token.isDraft && T.wasDraft].filter(Boolean).join(", ")}
          onClick=${() => setPlace(index === place ? null : index)}>${displayText(token.token)}</button>`)}
    </div>
    ${selected && html`
      <table class="alternatives">
        <caption>${T.alternatives}</caption>
        <tbody>
          ${selected.top_logprobs.map((other) => html`
            <tr key=${other.token}>
              <td><code>${displayText(other.token)}</code></td>
              <td>${percent(other.logprob)}</td>
              <td>${other.token === selected.token
                ? T.chosen
                : html`<button type="button" onClick=${() => session.branchAt(message, place, other)}>${T.continueWith(displayText(other.token))}</button>`}</td>
            </tr>`)}
        </tbody>
      </table>`}`;
}
