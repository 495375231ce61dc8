// Draws the curves with uPlot (embedded before this script) from the JSON in #curves, all zoomed together.
(() => {
  "use strict";
  const { charts, marks } = JSON.parse(document.getElementById("curves").textContent);
  const toolbar = document.getElementById("curve-tools");
  const root = document.documentElement;
  const steps = charts.flatMap((chart) => chart.x);
  const first = Math.min(...steps), last = Math.max(...steps);
  const all = { min: first, max: Math.max(last, first + 1) };
  const PRINT_WIDTH = 640;
  let range = { ...all };
  let plots = [];

  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  const text = (value) => {
    if (value == null) return "–";
    const size = Math.abs(value);
    if (size >= 10000) return new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 }).format(value);
    if (size > 0 && size < 0.001) return value.toExponential(1);
    return String(Number(value.toPrecision(4)));
  };

  // As many digits as the ticks need to differ.
  const labels = (ticks) => {
    const short = ticks.map(text);
    if (new Set(short).size === ticks.length) return short;
    const digits = [5, 6, 7, 8].find((n) => new Set(ticks.map((v) => v.toPrecision(n))).size === ticks.length) ?? 9;
    return ticks.map((v) => String(Number(v.toPrecision(digits))));
  };

  // Vertical lines at the steps that were rejected and at those a resumed run went on from.
  const drawMarks = (plot) => {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.lineWidth = 1.5 * devicePixelRatio;
    for (const mark of marks.filter(({ step }) => step >= range.min && step <= range.max)) {
      const x = Math.round(plot.valToPos(mark.step, "x", true));
      ctx.strokeStyle = colour(`--${mark.kind}`);
      ctx.setLineDash(mark.kind === "resumed" ? [5 * devicePixelRatio, 4 * devicePixelRatio] : []);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  };

  const setRange = (min, max) => {
    const width = Math.min(Math.max(max - min, 1), all.max - all.min);
    const start = Math.min(Math.max(min, all.min), all.max - width);
    range = { min: start, max: start + width };
    for (const plot of plots) {
      if (plot.scales.x.min !== range.min || plot.scales.x.max !== range.max) plot.setScale("x", { ...range });
    }
  };

  const options = (chart, width) => ({
    width,
    height: ["loss", "held_out"].includes(chart.name) ? 260 : 190,
    padding: [8, 26, 0, 0],
    scales: { x: { time: false, min: range.min, max: range.max } },
    cursor: { sync: { key: "curves" }, drag: { x: true, y: false, dist: 4 }, points: { size: 6 } },
    legend: { markers: { width: 2 } },
    axes: [axis({ values: (_, ticks) => ticks.map((v) => (Number.isInteger(v) ? v.toLocaleString("en") : "")) }),
      axis({ size: 58, values: (_, ticks) => labels(ticks) })],
    series: [
      { label: "step", value: (_, v) => (v == null ? "–" : v.toLocaleString("en")) },
      ...chart.series.map((series) => ({
        label: series.label,
        stroke: colour(series.colour),
        width: 1.5,
        spanGaps: true,
        points: { show: series.dots, size: 7, fill: colour(series.colour) },
        value: (_, v) => text(v),
      })),
    ],
    hooks: {
      draw: [drawMarks],
      setScale: [(plot, key) => key === "x" && plots.includes(plot) && setRange(plot.scales.x.min, plot.scales.x.max)],
    },
  });

  const axis = (more) => ({
    stroke: colour("--muted"),
    grid: { stroke: colour("--line"), width: 1 },
    ticks: { stroke: colour("--line"), width: 1 },
    font: "12px system-ui, sans-serif",
    ...more,
  });

  const hosts = charts.map((chart) => document.getElementById(`chart-${chart.name}`));

  const draw = (width) => {
    const old = plots;
    plots = [];
    old.forEach((plot) => plot.destroy());
    plots = charts.map((chart, i) => {
      const data = [chart.x, ...chart.series.map((series) => series.y)];
      return new uPlot(options(chart, width || hosts[i].clientWidth || hosts[0].clientWidth), data, hosts[i]);
    });
  };

  const zoom = (factor) => {
    const middle = (range.min + range.max) / 2, half = ((range.max - range.min) * factor) / 2;
    setRange(middle - half, middle + half);
  };
  const move = (share) => {
    const by = (range.max - range.min) * share;
    setRange(range.min + by, range.max + by);
  };
  const actions = {
    in: () => zoom(0.5),
    out: () => zoom(2),
    left: () => move(-0.4),
    right: () => move(0.4),
    all: () => setRange(all.min, all.max),
  };

  draw();
  toolbar.hidden = false;
  toolbar.addEventListener("click", (event) => actions[event.target.dataset.action]?.());

  // A chart in a closed part gets its width when the part is opened.
  const sizes = new ResizeObserver(() => plots.forEach((plot, i) => {
    const width = hosts[i].clientWidth;
    if (width && width !== plot.width) plot.setSize({ width, height: plot.height });
  }));
  hosts.forEach((host) => sizes.observe(host));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());

  // After fold.js has opened all parts and made the colors light.
  addEventListener("beforeprint", () => draw(PRINT_WIDTH));
  addEventListener("afterprint", () => draw());
})();
