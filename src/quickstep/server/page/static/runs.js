// The figures of simulated runs: the table, and latency and throughput as curves.
import { html } from "./html.js";
import { LineChart } from "./charts.js";

export function Runs({ report }) {
  return html`
    <div class="runs">
      ${report.sentence && html`<p>${report.sentence}</p>`}
      <div class="wide" tabindex="0">
        <table>
          <thead><tr>${report.header.map((name) => html`<th scope="col">${name}</th>`)}</tr></thead>
          <tbody>${report.rows.map((row) => html`<tr>${row.map((cell, place) =>
            place === 0 ? html`<th scope="row">${cell}</th>` : html`<td>${cell}</td>`)}</tr>`)}</tbody>
        </table>
      </div>
      <div class="grid">
        ${report.charts.map((chart) => html`
          <${LineChart} key=${chart.title} title="${chart.title} (${chart.y_unit})" xLabel=${chart.x_unit} height=${240}
            names=${chart.lines.map((line) => line.name)} data=${joined(chart.lines)} />`)}
      </div>
    </div>`;
}

/** Lines of their own points as columns over all x. */
function joined(lines) {
  const all = [...new Set(lines.flatMap((line) => line.points.map(([x]) => x)))].sort((a, b) => a - b);
  const columns = lines.map((line) => {
    const known = new Map(line.points);
    return all.map((x) => known.get(x) ?? null);
  });
  return [all, ...columns];
}
