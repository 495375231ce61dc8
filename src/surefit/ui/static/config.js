// The editor: line numbers, findings as one types, the form that edits the text, saving.
import { byId, confirmRun, element, latest, post } from "./common.js";

const text = byId("text"), gutter = byId("gutter"), nameField = byId("name");
let saved = text.value;
let marked = new Set();

const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

function number() {
  const lines = text.value.split("\n").length;
  gutter.replaceChildren(...Array.from({ length: lines }, (_, i) =>
    element("span", `${i + 1}\n`, marked.has(i + 1) ? { class: "marked" } : {})));
  gutter.scrollTop = text.scrollTop;
}

function goTo(line) {
  const lines = text.value.split("\n");
  const start = lines.slice(0, line - 1).reduce((sum, each) => sum + each.length + 1, 0);
  text.focus();
  text.setSelectionRange(start, start + (lines[line - 1] ?? "").length);
  text.scrollTop = (line - 4) * parseFloat(getComputedStyle(text).lineHeight);
}

function finding(one) {
  const item = element("li", null, { class: `severity-${one.severity}` });
  const head = element("p", null, { class: "head" });
  head.append(element("span", one.severity, { class: "pill" }), element("code", one.code));
  if (one.line) {
    const place = element("button", `line ${one.line}`, { type: "button" });
    place.addEventListener("click", () => goTo(one.line));
    head.append(place);
  }
  item.append(head, element("p", `${one.field ? `${one.field}: ` : ""}${one.message}`));
  if (one.help) item.append(element("p", one.help, { class: "hint" }));
  return item;
}

function fill(values) {
  for (const field of document.querySelectorAll("#fields [data-key]")) {
    const value = values[field.dataset.key] ?? "";
    if (field === document.activeElement || field.value === value) continue;
    if (field.tagName === "SELECT" && ![...field.options].some((option) => option.value === value)) {
      field.append(element("option", value));
    }
    field.value = value;
  }
}

const check = latest(350, async (signal) => {
  let answer;
  try {
    answer = await post("/api/check", { name: nameField.value, text: text.value }, signal);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    byId("tally").textContent = error.message;
    return;
  }
  const count = (severity) => answer.findings.filter((one) => one.severity === severity).length;
  marked = new Set(answer.findings.map((one) => one.line));
  const skipped = answer.skipped ? `; ${answer.skipped}` : "";
  byId("tally").textContent = answer.findings.length
    ? `${plural(count("error"), "error")}, ${plural(count("warning"), "warning")}, ${count("info")} info${skipped}`
    : `No problem found by ${answer.rules} rules${skipped}.`;
  byId("findings").replaceChildren(...answer.findings.map(finding));
  fill(answer.values);
  number();
});

byId("fields").addEventListener("change", async ({ target }) => {
  try {
    const answer = await post("/api/edit", { text: text.value, key: target.dataset.key, value: target.value });
    text.value = answer.text;
    byId("saved").textContent = answer.refused ?? "";
  } catch (error) {
    byId("saved").textContent = error.message;
  }
  number();
  check();
});

byId("save").addEventListener("submit", async (event) => {
  event.preventDefault();
  const same = nameField.value === nameField.defaultValue;
  const content = text.value;
  try {
    const answer = await post("/api/save", { name: nameField.value, text: content, known: same ? nameField.dataset.known || null : null });
    saved = content;
    nameField.defaultValue = answer.name;
    nameField.dataset.known = answer.known;
    history.replaceState(null, "", `/config?${new URLSearchParams({ open: answer.name })}`);
    byId("saved").textContent = `Saved ${answer.name}.`;
    byId("run").hidden = false;
  } catch (error) {
    byId("saved").textContent = error.message;
  }
});

byId("run").addEventListener("click", () => {
  if (text.value !== saved) byId("saved").textContent = "Save it first: what runs is the file.";
  else confirmRun(nameField.defaultValue, byId("saved"));
});
text.addEventListener("input", () => { number(); check(); });
text.addEventListener("scroll", () => { gutter.scrollTop = text.scrollTop; });
addEventListener("beforeunload", (event) => { if (text.value !== saved) event.preventDefault(); });
number();
check();
