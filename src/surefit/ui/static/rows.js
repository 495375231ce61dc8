// Begins with somebody's rows: uploads a file, shows what it is and the config made for it, saves that, and runs it.
import { byId, confirmRun, element, latest, post, quoted, ticked, upload } from "./common.js";

const drop = byId("drop"), rows = byId("rows"), most = Number(drop.dataset.most);
const NAMES = ["Rows", "Model", "Training"];
let draft = null;

const reveal = (is) => { for (const id of ["settings", "found-title", "seen"]) byId(id).hidden = !is; };
const say = (text) => ticked(byId("status"), text);

async function take(file) {
  if (!file) return;
  if (file.size > most) {
    say(`${file.name} has ${Math.round(file.size / 2 ** 20)} MiB: more than the page takes. Copy it into the workspace directory, and reload this page.`);
    return;
  }
  try {
    const { name } = await upload(file, (percent) => say(`Copying ${file.name}: ${percent} %`));
    if (![...rows.options].some((option) => option.value === name)) rows.append(element("option", name, { value: name }));
    rows.value = name;
    say(`Stored as ${name}.`);
    read();
  } catch (error) {
    say(error.message);
  }
}

function show(answer) {
  draft = answer;
  const facts = answer.seen.map((text, i) => [NAMES[i], text]);
  facts.splice(1, 0, ["Columns", answer.columns.join(", ")]);
  byId("seen").replaceChildren(...facts.flatMap(([name, text]) => [element("dt", name), ticked(element("dd"), text)]));
  byId("config").textContent = answer.text;
  byId("name").value = answer.name;
  byId("submit").disabled = false;
  reveal(true);
  byId("proposals").hidden = answer.proposals.length < 2;
  byId("proposals").replaceChildren(element("span", "Models that fit:"), ...answer.proposals.map((one) => {
    const button = element("button", `${one.name} (${one.size}, ${one.license})`, { type: "button" });
    button.addEventListener("click", () => { byId("model").value = one.name; read(); });
    return button;
  }));
}

const ask = latest(300, async (signal) => {
  try {
    show(await post("/api/draft", { rows: rows.value, model: byId("model").value, gpu: byId("gpu").value }, signal));
    say("");
  } catch (error) {
    if (error.name === "AbortError") throw error;
    byId("proposals").hidden = true;
    reveal(false);
    say(error.message);
  }
});

// Asks for the config of what is chosen now; the earlier one can no longer be saved.
function read() {
  if (!rows.value) return;
  draft = null;
  byId("submit").disabled = true;
  byId("saved").textContent = "";
  byId("next").hidden = true;
  byId("found").hidden = false;
  say(`Reading ${rows.value}…`);
  ask();
}

byId("save").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (!draft) return;
  try {
    const { name } = await post("/api/save", { name: byId("name").value, text: draft.text, known: null });
    const query = (key) => new URLSearchParams({ [key]: name });
    byId("saved").textContent = `Saved ${name}.`;
    byId("command").textContent = name === draft.name ? draft.command : `surefit run ${quoted(name)}`;
    byId("edit").href = `/config?${query("open")}`;
    byId("plan").href = `/planner?${query("config")}`;
    byId("run").dataset.config = name;
    byId("next").hidden = false;
  } catch (error) {
    byId("saved").textContent = error.message;
  }
});

byId("run").addEventListener("click", () => confirmRun(byId("run").dataset.config, byId("saved")));
byId("file").addEventListener("change", ({ target }) => take(target.files[0]));
for (const name of ["dragenter", "dragover", "dragleave", "drop"]) {
  drop.addEventListener(name, (event) => {
    event.preventDefault();
    drop.classList.toggle("over", name === "dragenter" || name === "dragover");
    if (name === "drop") take(event.dataTransfer.files[0]);
  });
}
rows.addEventListener("change", read);
byId("model").addEventListener("change", read);
byId("gpu").addEventListener("change", read);
