// Line charts, by uPlot, in the colours of the page.
import { html, useEffect, useRef } from "./html.js";
import { T } from "./texts.js";
import uPlot from "./vendor/uplot.js";

const COLOURS = ["--series-1", "--series-2", "--series-3", "--series-4", "--series-5", "--series-6"];

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const seriesColour = (place) => colour(COLOURS[place % COLOURS.length]);

/**
 * A chart. `data` is [x, y1, y2, ...] with a name per y in `names`; `range` fixes the x axis.
 * `onRange` gets the range that the user has selected, null for all. The names in `scattered` have points
 * instead of lines; `isLogarithmic` is for both axes; labels of the x axis count from `origin`.
 */
export function LineChart({
  title, names, data, range, onRange, xLabel, height = 150, steps = false, scattered = [], isLogarithmic = false, origin = 0,
}) {
  const element = useRef(null);
  const plot = useRef(null);
  const latest = useRef({});
  latest.current = { range, onRange, origin };
  useEffect(() => {
    const make = () => {
      plot.current?.destroy();
      const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, size: 54 };
      const options = {
        width: element.current.clientWidth || 600,
        height,
        cursor: { sync: { key: onRange ? "timeline" : title } },
        scales: isLogarithmic ? { x: { time: false, distr: 3 }, y: { distr: 3 } } : {
          x: { time: false, range: (_, least, most) => latest.current.range ?? [least, most === least ? least + 1 : most] },
          y: { range: (_, __, most) => [0, (most || 1) * 1.05] },
        },
        axes: [
          { ...axis, size: xLabel ? 44 : 28, label: xLabel, labelSize: 16,
            ...(onRange && { values: (_, ticks) => ticks.map((tick) => `${+(tick - latest.current.origin).toFixed(6)}`) }) },
          axis,
        ],
        series: [
          { label: xLabel || T.seconds },
          ...names.map((name, place) => ({
            label: name, stroke: seriesColour(place), spanGaps: true,
            ...(scattered.includes(name)
              ? { width: 0, points: { show: true, size: 8, fill: seriesColour(place) } }
              : { width: 1.5, points: { show: false } }),
            ...(steps && { paths: uPlot.paths.stepped({ align: 1 }) }),
          })),
        ],
        hooks: {
          setSelect: [(self) => {
            if (!latest.current.onRange || self.select.width < 4) return;
            const left = self.posToVal(self.select.left, "x");
            latest.current.onRange([left, self.posToVal(self.select.left + self.select.width, "x")]);
            self.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          }],
        },
      };
      plot.current = new uPlot(options, data, element.current);
    };
    make();
    const resized = new ResizeObserver(() => plot.current.setSize({ width: element.current.clientWidth || 600, height }));
    resized.observe(element.current);
    addEventListener("themechange", make);
    return () => {
      resized.disconnect();
      removeEventListener("themechange", make);
      plot.current.destroy();
      plot.current = null;
    };
  }, [names.join()]);
  useEffect(() => plot.current?.setData(data), [data, range]);
  return html`
    <figure class="chart" onDblClick=${() => onRange?.(null)}>
      <figcaption>${title}</figcaption>
      <div ref=${element} role="img" aria-label=${title}></div>
    </figure>`;
}
