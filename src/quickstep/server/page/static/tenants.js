// What each tenant (API key) got of the device: for fairness, and as the part of the costs that is its own.
import { html } from "./html.js";
import { T } from "./texts.js";

const percentile = (sorted, part) => sorted[Math.min(sorted.length - 1, Math.floor(part * sorted.length))];

/** By tenant, those with most device time first. */
function totals(sequences) {
  const tenants = new Map();
  for (const { tenant = "", timings } of sequences) {
    if (!tenants.has(tenant)) tenants.set(tenant, { tenant, count: 0, tokens: 0, device: 0, queue: 0, ttft: [] });
    const total = tenants.get(tenant);
    total.count += 1;
    total.tokens += timings.num_output_tokens;
    total.device += timings.device_s;
    total.queue += timings.queue_s;
    if (timings.first_token_s !== null) total.ttft.push((timings.first_token_s - timings.arrival_s) * 1e3);
  }
  for (const total of tenants.values()) total.ttft.sort((a, b) => a - b);
  return [...tenants.values()].sort((a, b) => b.device - a.device);
}

export function Tenants({ sequences }) {
  const ended = sequences.filter((sequence) => sequence.kind === "sequence");
  if (!ended.length) return null;
  const all = totals(ended);
  const device = all.reduce((sum, total) => sum + total.device, 0) || 1;
  const cells = (total) => [
    total.count, total.tokens, total.device.toFixed(3),
    html`<meter min="0" max="1" value=${total.device / device}></meter> ${(100 * total.device / device).toFixed(1)} %`,
    (total.queue / total.count * 1e3).toFixed(1),
    total.ttft.length ? `${percentile(total.ttft, 0.5).toFixed(0)} / ${percentile(total.ttft, 0.99).toFixed(0)}` : "",
  ];
  return html`
    <h2>${T.tenants}</h2>
    <div class="wide" tabindex="0"><table class="tenants">
      <thead><tr>${T.tenantColumns.map((name) => html`<th scope="col">${name}</th>`)}</tr></thead>
      <tbody>${all.map((total) => html`
        <tr key=${total.tenant}><th scope="row">${total.tenant || T.noTenant}</th>
          ${cells(total).map((cell) => html`<td>${cell}</td>`)}</tr>`)}</tbody>
    </table></div>`;
}
