// Follows a run: asks for what is new, and draws it with uPlot; stops it, and goes on with it.
import { byId, confirmed, post, quoted, ticked } from "./common.js";

const path = document.getElementById("run").dataset.path;
const figures = [...document.querySelectorAll("#charts figure")];
const WAIT = 2000, GIB = 2 ** 30;
const NAMES = { loss: "training loss", eval_loss: "held-out loss", memory_bytes: "memory (GiB)", disk_free_bytes: "free (GiB)" };
let lines = new Map();
let place = "";
let plots = [];
let drawn = [];

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const short = (value) => (value == null ? "–" : Math.abs(value) >= 1e-3 || value === 0 ? Number(value.toPrecision(4)).toLocaleString("en", { maximumFractionDigits: 6 }) : value.toExponential(1));
const set = (id, text) => { const node = document.getElementById(id); if (node.textContent !== text) node.textContent = text; };

function add(record) {
  const known = lines.get(record.step) ?? {};
  for (const [key, value] of Object.entries(record)) if (typeof value === "number") known[key] = key.endsWith("_bytes") ? value / GIB : value;
  lines.set(record.step, known);
}

function columns(series) {
  const steps = [...lines.keys()].sort((a, b) => a - b);
  return [steps, ...series.map((name) => steps.map((step) => lines.get(step)[name] ?? null))];
}

const axis = (more) => ({ stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 }, font: "12px system-ui, sans-serif", ...more });

function make(figure) {
  const series = figure.dataset.series.split(","), host = figure.querySelector(".chart");
  const options = {
    width: host.clientWidth, height: 200, padding: [8, 26, 0, 0], legend: { show: false },
    scales: { x: { time: false } }, cursor: { sync: { key: "run" }, drag: { x: true, y: false } },
    axes: [axis({ values: (_, ticks) => ticks.map((v) => (Number.isInteger(v) ? v.toLocaleString("en") : "")) }), axis({ size: 62, values: (_, ticks) => ticks.map(short) })],
    series: [{ label: "step" }, ...series.map((name, i) => ({ label: NAMES[name] ?? name, stroke: colour(`--series-${i + 1}`), width: 1.5, spanGaps: true, points: { show: i > 0 } }))],
  };
  return { figure, series, host, plot: new uPlot(options, columns(series), host) };
}

function draw(anew) {
  const empty = lines.size === 0;
  document.getElementById("charts").hidden = empty;
  document.getElementById("no-steps").hidden = !empty;
  if (empty) return;
  // What was not measured, as a GPU's memory without one, has no chart.
  const measured = figures.filter((figure) => figure.dataset.series.split(",").some((name) => [...lines.values()].some((line) => name in line)));
  if (anew || measured.length !== drawn.length) {
    for (const { plot } of plots) plot.destroy();
    for (const figure of figures) figure.hidden = !measured.includes(figure);
    plots = measured.map(make);
    drawn = measured;
  }
  for (const { figure, series, plot } of plots) {
    const data = columns(series);
    plot.setData(data);
    const last = series.map((name, i) => `${NAMES[name] ?? name.replaceAll("_", " ")} ${short(data[i + 1].findLast((value) => value != null))}`);
    figure.querySelector(".last").textContent = last.join(", ");
  }
}

function state({ event, holder, job }) {
  const last = event ? `${event.stage} ${event.event}` : job?.running ? "check and plan" : "not started";
  if (holder && !job?.running) return `${last}; in use by ${holder}`;
  return job ? `${last}; “${job.command}” ${job.state}` : last;
}

// Once a run has ended, its page has scores, a report and a model that it was not made with.
let wasRunning = false;

function show({ job, holder, resumable, log }) {
  if (wasRunning && !holder) location.reload();
  wasRunning = Boolean(holder);
  byId("stop").hidden = !job?.running;
  byId("resume").hidden = !resumable;
  byId("talk")?.toggleAttribute("hidden", Boolean(holder)); // the run needs the memory
  byId("output").hidden = !log.length;
  const text = log.join("\n");
  if (byId("log").textContent === text) return;
  byId("log").textContent = text;
  byId("log").scrollTop = byId("log").scrollHeight;
}

async function act(title, text, command, yes, address, body, done) {
  if (!(await confirmed(title, text, command, yes))) return false;
  try {
    await post(address, body);
    byId("did").textContent = done;
    return true;
  } catch (error) {
    ticked(byId("did"), error.message);
    return false;
  }
}

let stops = 0;
byId("stop").addEventListener("click", async () => {
  const text = stops
    ? "It was asked to stop, and saves its work. A second time it ends at once: what came after the last checkpoint is lost."
    : "It ends the step that it is in, saves its work and stops, as with Ctrl-C. You can go on with it later.";
  const [title, yes] = stops ? ["End it at once?", "End at once"] : ["Stop this run?", "Stop"];
  if (await act(title, text, "", yes, "/api/stop", { run: path }, "Stopping…")) stops += 1;
});
byId("resume").addEventListener("click", async () => {
  const text = "It goes on from the last checkpoint, and leaves out the stages that are done.";
  if (await act("Go on with this run?", text, `surefit run ${quoted(path)} --resume`, "Go on", "/api/start", { run: path }, "Started.")) stops = 0;
});

async function follow() {
  try {
    const answer = await fetch(`/api/watch?${new URLSearchParams({ path, from: place })}`);
    if (!answer.ok) throw new Error(`the server returned ${answer.status}`);
    const news = await answer.json();
    if (news.anew) lines = new Map();
    news.lines.forEach(add);
    place = news.next;
    if (news.lines.length || news.anew) draw(news.anew);
    set("state", state(news));
    show(news);
    set("step", lines.size ? String([...lines.keys()].reduce((most, step) => Math.max(most, step), 0)) : "–");
    set("disk", `${news.disk}, ${news.free} free`);
    setTimeout(follow, news.more ? 0 : document.hidden ? 5 * WAIT : WAIT);
  } catch (error) {
    set("state", `no longer updated: ${error.message}`);
    setTimeout(follow, 5 * WAIT);
  }
}

new ResizeObserver(() => plots.forEach(({ host, plot }) => {
  if (host.clientWidth && host.clientWidth !== plot.width) plot.setSize({ width: host.clientWidth, height: plot.height });
})).observe(document.getElementById("charts"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(true));
follow();
