// A line plot over steps: drawn when it comes into sight, redrawn when its data, its size or the colours change.
import { html, useEffect, useLayoutEffect, useRef, useState } from "../vendor/preact-htm.js";
import uPlot from "../vendor/uplot.js";
import { num } from "./format.js";

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function axes(small, plain) {
  const common = {
    stroke: style("--dim"),
    grid: { stroke: style("--line"), width: 1 },
    ticks: { show: false },
    font: "11px system-ui, sans-serif",
  };
  return [
    {
      ...common,
      space: small ? 60 : 80,
      size: 24,
      ...(plain
        ? { values: (_, splits) => splits.map((v) => (v === null ? "" : num(v))) }
        : { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 50000, 100000] }),
    },
    { ...common, size: small ? 46 : 52, space: small ? 28 : 36, values: (_, splits) => splits.map((v) => (v === null ? "" : num(v))) },
  ];
}

// Rewards between 0 and 1 have the same axis everywhere. A constant is in the middle, not at the edge of 0 to 100.
function rangeOf(low, high, unit) {
  if (low === null) return [0, 1];
  if (unit && low >= 0 && high <= 1) return [0, 1.02];
  if (low === high) return low === 0 ? [0, 1] : [low - Math.abs(low) / 2, low + Math.abs(low) / 2];
  return uPlot.rangeNum(low, high, 0.1, true);
}

function options({ series, small, height, width, unit, onCursor, plain }) {
  const all = series.flatMap((s) => (s.low ? [s.low, s.high] : []).map(() => ({ stroke: "transparent", spanGaps: true, points: { show: false } })));
  const bands = [];
  let next = 1 + series.length;
  for (const s of series) {
    if (s.low) {
      bands.push({ series: [next + 1, next], fill: `color-mix(in srgb, ${style(s.color)} 18%, transparent)` });
      next += 2;
    }
  }
  return {
    width,
    height,
    legend: { show: false },
    cursor: { y: false, drag: { x: true, y: false, setScale: true, dist: 5 }, points: { size: 7 } },
    scales: { x: { time: false }, y: { range: (_, low, high) => rangeOf(low, high, unit) } },
    axes: axes(small, plain),
    series: [
      {},
      ...series.map((s) => ({
        stroke: style(s.color),
        width: s.width || 1.5,
        dash: s.dash,
        spanGaps: true,
        points: { show: Boolean(s.points), size: 6, fill: style("--panel") },
      })),
      ...all,
    ],
    bands,
    hooks: { setCursor: [(u) => onCursor(u.cursor.idx)] },
  };
}

const columns = (steps, series) => [steps, ...series.map((s) => s.values), ...series.flatMap((s) => (s.low ? [s.low, s.high] : []))];

// series: [{label, values, color (a CSS variable), low, high, points, dash}]. onPick(step) on a click or Enter; dragging
// zooms, a double click shows all again. x: where each step is on the axis, if not at its number.
export function Plot({ label, steps, series, height = 260, small = false, unit = false, onPick, note, x = null }) {
  const xs = x || steps;
  const box = useRef(null);
  const plot = useRef(null);
  const [seen, setSeen] = useState(false);
  const [theme, setTheme] = useState(0);
  const [at, setAt] = useState(null);
  const shape = `${Boolean(x)} ${series.map((s) => `${s.label}${s.low ? "~" : ""}`).join("|")}`;

  useEffect(() => {
    const watch = new IntersectionObserver(([entry]) => entry.isIntersecting && setSeen(true), { rootMargin: "200px" });
    watch.observe(box.current);
    // Those out of sight follow a little later, for print and for pictures of the whole page.
    const later = setTimeout(() => setSeen(true), 500);
    const changed = () => setTheme((n) => n + 1);
    addEventListener("themechange", changed);
    return () => {
      watch.disconnect();
      clearTimeout(later);
      removeEventListener("themechange", changed);
    };
  }, []);

  useLayoutEffect(() => {
    if (!seen) return undefined;
    const width = box.current.clientWidth;
    const made = new uPlot(options({ series, small, height, width, unit, onCursor: setAt, plain: Boolean(x) }), columns(xs, series), box.current);
    plot.current = made;
    const resize = new ResizeObserver(() => {
      if (box.current && box.current.clientWidth !== made.width) made.setSize({ width: box.current.clientWidth, height });
    });
    resize.observe(box.current);
    return () => {
      resize.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [seen, theme, shape, height]);

  useEffect(() => {
    if (plot.current && (plot.current.data[0] !== xs || plot.current.data[1] !== series[0]?.values)) plot.current.setData(columns(xs, series));
  }, [xs, series[0]?.values]);

  function pick() {
    const index = plot.current?.cursor.idx;
    if (onPick && index !== null && index !== undefined) onPick(steps[index]);
  }
  function keys(event) {
    const u = plot.current;
    if (!u) return;
    const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Enter") pick();
    else if (move !== undefined) {
      event.preventDefault();
      const from = u.cursor.idx ?? (move > 0 ? -1 : steps.length);
      const index = Math.max(0, Math.min(steps.length - 1, from + move));
      u.setCursor({ left: u.valToPos(xs[index], "x"), top: height / 2 });
    }
  }
  const index = at ?? steps.length - 1;
  return html`<figure class="plot ${small ? "small" : ""} ${onPick ? "pick" : ""}">
    <figcaption>
      <span class="name">${label}</span>
      <span class="legend" aria-live="polite">
        ${steps.length > 0 && html`<span class="dim">step ${num(steps[index])}</span>`}
        ${series.map(
          (s) => html`<span class="key">
            <i class="swatch c${s.color.slice(2)} ${s.dash ? "dashed" : ""}"></i>${s.label}
 <b>${num(at === null ? last(s.values) : s.values[index])}</b>${at === null && lastIndex(s.values) !== index && lastIndex(s.values) >= 0 && html`<span class="dim"> at step ${num(steps[lastIndex(s.values)])}</span>`}
          </span>`,
        )}
      </span>
    </figcaption>
    <div
      class="canvas h${height}"
      ref=${box}
      tabindex="0"
      role=${onPick ? "button" : "img"}
      aria-label=${`${label}: ${series.map((s) => `${s.label} ${num(last(s.values))}`).join(", ")} at step ${num(steps.at(-1))}. Arrow keys move${onPick ? ", Enter opens the step" : ""}.`}
      onClick=${pick}
      onKeyDown=${keys}
    ></div>
    ${note && html`<p class="dim note">${note}</p>`}
  </figure>`;
}

const lastIndex = (values) => values.findLastIndex((value) => value !== null && value !== undefined);
const last = (values) => values[lastIndex(values)] ?? null;
