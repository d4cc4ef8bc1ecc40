// The figures of a report: its table and curves, the grid of a sweep, the memory of a device as a bar.
import { html } from "./html.js";
import { LineChart } from "./charts.js";
import { T } from "./texts.js";

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
      ${report.memory.length > 0 && html`<${Memory} parts=${report.memory} />`}
      ${report.grid && html`<${Grid} grid=${report.grid} />`}
      <div class="grid">
        ${report.charts.map((chart) => html`
          <${LineChart} key=${chart.title} title="${chart.title} (${chart.y_unit})" xLabel=${chart.x_unit} height=${240}
            names=${chart.lines.map((line) => line.name)} data=${joined(chart.lines)} isLogarithmic=${chart.is_logarithmic}
            scattered=${chart.lines.filter((line) => line.is_scattered).map((line) => line.name)} />`)}
      </div>
    </div>`;
}

function Memory({ parts }) {
  const total = parts.reduce((sum, part) => sum + part.num_bytes, 0) || 1;
  return html`
    <h2>${T.memory}</h2>
    <div class="memory" role="img" aria-label=${T.memory}>
      ${parts.map((part, place) => html`
        <i class="part-${place % 6}" style=${{ flexGrow: (1e3 * part.num_bytes) / total }} title="${part.name}: ${part.detail}"></i>`)}
    </div>
    <ul class="parts">
      ${parts.map((part, place) => html`<li><i class="swatch part-${place % 6}"></i>${part.name}: ${part.detail}</li>`)}
    </ul>`;
}

/** Combinations over loads; a cell's colour is the part of its requests within the targets. */
function Grid({ grid }) {
  return html`
    <h2>${grid.title}</h2>
    <div class="wide" tabindex="0">
      <table>
        <thead><tr><td></td>${grid.column_names.map((name) => html`<th scope="col">${name}</th>`)}</tr></thead>
        <tbody>${grid.cells.map((cells, row) => html`<tr>
          <th scope="row">${grid.row_names[row]}</th>
          ${cells.map((cell) => cell === null
            ? html`<td></td>`
            : html`<td class="part-met-${Math.floor(4 * cell.part)}">${Math.floor(100 * cell.part)}%${cell.is_met && html` <span role="img" aria-label=${T.targetMet} title=${T.targetMet}>✓</span>`}</td>`)}
        </tr>`)}</tbody>
      </table>
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
