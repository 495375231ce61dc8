// The planner: every change asks the closed form; the button asks for the simulated plan.
import { byId, element, latest, post } from "./common.js";

const form = byId("plan"), result = byId("result");
const NUMBERS = new Set(["data.max_length", "train.global_batch_size", "lora.r", "hardware.count", "train.max_steps"]);
const VERDICTS = { fits: "good", "does not fit": "bad" };
let changed = 0;

const typed = (key, value) =>
  NUMBERS.has(key) || /^\d+$/.test(value) ? Number(value) : { true: true, True: true, false: false, False: false }[value] ?? value;

function asked() {
  const fields = [...form.querySelectorAll("[data-key]")];
  const changes = Object.fromEntries(fields.map((field) => [field.dataset.key, typed(field.dataset.key, field.value)]));
  const price = byId("price").value;
  return { config: form.dataset.config, changes, price: price === "" ? null : Number(price) };
}

// The same term has the same colour in every bar: its place among all terms that were ever drawn.
const seen = [];
function colour(term) {
  if (!seen.includes(term)) seen.push(term);
  return term === "held" ? "held" : `term-${seen.indexOf(term) % 12}`;
}

function bar(one, whole, capacity) {
  const row = element("div", null, { class: "phase" });
  const name = element("p", null, { class: "phase-name" });
  name.append(element("span", one.name), element("span", one.text, { class: "size" }));
  const parts = one.terms.map((term) => `${term.term} ${term.text}`).join(", ");
  const track = element("div", null, { class: "stack", role: "img", "aria-label": `${one.name}: ${one.text}; ${parts}` });
  for (const term of one.terms) {
    const part = element("span", null, { class: colour(term.term), title: `${term.term}: ${term.text}` });
    part.style.width = `${(100 * term.bytes) / whole}%`;
    track.append(part);
  }
  if (capacity) {
    const edge = element("i", null, { class: "capacity" });
    edge.style.left = `${(100 * capacity) / whole}%`;
    track.append(edge);
  }
  row.append(name, track);
  return row;
}

function legend(bars) {
  const terms = [...new Set(bars.flatMap((one) => one.terms.map((term) => term.term)))].filter((term) => term !== "held");
  const list = element("ul", null, { class: "legend" });
  for (const term of terms) {
    const item = element("li");
    item.append(element("i", null, { class: colour(term), "aria-hidden": "true" }), element("span", term));
    list.append(item);
  }
  return list;
}

function facts(plan) {
  const decided = plan.decided
    ? Object.entries(plan.decided).map(([key, value]) => `${key.split(".")[1].replaceAll("_", " ")} ${value}`).join(" · ") : null;
  const rows = [
    ["Assumed", plan.assumed],
    ["Steps", plan.steps_text],
    ["Time", plan.time_text],
    ["Time of scoring", plan.scoring_text],
    ["Per step", `${plan.step_text}; ${plan.how === "simulation" ? "" : "at most "}${plan.speed_text}`],
    ["Cost", plan.cost_text],
    ["Disk", `${plan.disk_text} (${plan.disk.map((term) => `${term.term} ${term.text}`).join(", ")}); ${plan.free_text}`],
    ["Decided", decided],
    ["Memory of", plan.ranks],
    ["Rates", plan.rates],
  ];
  return rows.filter(([, value]) => value).flatMap(([name, value]) => [element("dt", name), element("dd", value)]);
}

function draw(plan) {
  const verdict = byId("verdict");
  verdict.className = `answer tone-${VERDICTS[plan.verdict] ?? "warning"}`;
  verdict.textContent = `${plan.verdict[0].toUpperCase()}${plan.verdict.slice(1)}: ${plan.needed_text} of ${plan.capacity_text} on ${plan.device}`;
  byId("why").textContent = [
    plan.how === "simulation" ? "Simulated: every tensor of a step." : "By closed form; time and cost cover the matrix products only.",
    ...plan.does_not_fit.filter((text) => !text.startsWith("memory:")),
  ].join(" ");
  const whole = Math.max(plan.capacity ?? 0, plan.high ?? 0, ...plan.bars.map((one) => one.bytes), 1);
  byId("bars").replaceChildren(legend(plan.bars), ...plan.bars.map((one) => bar(one, whole, plan.capacity)));
  byId("facts").replaceChildren(...facts(plan));
  const fullest = plan.bars.reduce((most, one) => (one.bytes > most.bytes ? one : most), { bytes: -1, terms: [] });
  const detailed = fullest.terms.length > 1 ? fullest : plan.bars[0] ?? fullest;
  byId("terms").tBodies[0].replaceChildren(...[...detailed.terms].sort((a, b) => b.bytes - a.bytes).map((term) => {
    const row = element("tr");
    row.append(element("th", term.term, { scope: "row" }), element("td", term.text, { class: "num" }), element("td", term.why));
    return row;
  }));
  byId("left-out").replaceChildren(...plan.left_out.map((text) => element("li", text)));
}

function refuse(error) {
  byId("verdict").className = "answer tone-neutral";
  byId("verdict").textContent = error.message;
  byId("why").textContent = "";
}

const fit = latest(40, async (signal) => {
  result.setAttribute("aria-busy", "true");
  try {
    draw(await post("/api/fit", asked(), signal));
  } catch (error) {
    if (error.name === "AbortError") throw error;
    refuse(error);
  }
  result.setAttribute("aria-busy", "false");
});

const slot = (slider) => slider.dataset.steps.split(",").map(Number);

function settle(slider) {
  const value = Number(byId(slider.dataset.for).value), steps = slot(slider);
  const nearest = steps.reduce((best, step, i) => (Math.abs(step - value) < Math.abs(steps[best] - value) ? i : best), 0);
  slider.value = String(nearest);
  slider.setAttribute("aria-valuetext", String(value));
}

for (const slider of form.querySelectorAll("[data-steps]")) {
  settle(slider);
  slider.addEventListener("input", () => {
    const value = slot(slider)[Number(slider.value)];
    byId(slider.dataset.for).value = String(value);
    slider.setAttribute("aria-valuetext", String(value));
  });
  byId(slider.dataset.for).addEventListener("input", () => settle(slider));
}
form.addEventListener("input", () => { changed += 1; fit(); });
form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const button = form.querySelector("[type=submit]"), status = byId("simulating"), now = changed;
  button.disabled = true;
  status.textContent = "Simulating…";
  try {
    const plan = await post("/api/simulate", asked());
    status.textContent = now === changed ? "Simulated, as by `surefit plan`." : "Simulated, but the form has changed since.";
    if (now === changed) draw(plan);
  } catch (error) {
    status.textContent = error.message;
  }
  button.disabled = false;
});
fit();
