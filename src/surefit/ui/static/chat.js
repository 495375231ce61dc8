// The conversation: posts a message, and shows the answers as they are written.
import { byId, element, stream, ticked } from "./common.js";

const path = byId("chat").dataset.path, shown = byId("turns"), message = byId("message");
const chosen = () => [...new Set([...(byId("beside")?.checked ? ["base"] : []), byId("variant").value])];
let turns = []; // what was said, [message, {variant: answer}]: it is sent with every message, for only this page keeps it
let weights = null;
let controller = null;

const say = (text) => ticked(byId("said"), text);

function busy(is) {
  byId("submit").disabled = is;
  byId("stop").hidden = !is;
}

function begin() {
  controller?.abort();
  turns = [];
  shown.replaceChildren(byId("empty") ?? "");
  say("");
}

function addTurn(text, variants) {
  byId("empty")?.remove();
  const turn = element("article", null, { class: "turn" });
  const question = element("div", null, { class: "question" });
  question.append(element("p", "You", { class: "label" }), element("p", text, { class: "said" }));
  const answers = element("div", null, { class: "answers" });
  const places = Object.fromEntries(variants.map((name) => {
    const place = element("div", null, { class: "reply" }), said = element("p", "", { class: "said" });
    place.append(element("p", name, { class: "label" }), said);
    answers.append(place);
    return [name, said];
  }));
  turn.append(question, answers);
  shown.append(turn);
  return { text, turn, places };
}

function heard(record, { text, turn, places }) {
  if (record.loading) say("Loading the model…");
  if (record.weights) {
    const isNew = turns.length && weights !== record.weights;
    if (isNew) turn.before(element("p", "The run was trained again: from here on its new weights answer.", { class: "hint" }));
    weights = record.weights;
  }
  if (record.note) turn.before(element("p", record.note, { class: "hint" }));
  if (record.variant) {
    say("");
    places[record.variant].append(record.text);
    shown.scrollTop = shown.scrollHeight;
  }
  if (record.error) throw new Error([record.error, record.help].filter(Boolean).join(": "));
  if (record.answers) turns.push([text, record.answers]);
  if (record.cut?.length) say(`Cut at the longest answer (evaluate.max_new_tokens): ${record.cut.join(", ")}.`);
  if (record.full?.length) say("The conversation is as long as the model can read: begin a new one.");
}

byId("send").addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = message.value, variants = chosen();
  if (!text.trim() || controller) return;
  const turn = addTurn(text, variants);
  controller = new AbortController();
  busy(true);
  message.value = "";
  say("");
  try {
    await stream("/api/chat", { path, variants, message: text, turns }, controller.signal, (record) => heard(record, turn));
  } catch (error) {
    turn.turn.classList.add("forgotten");
    const tooLong = error.status === 413 && "The conversation is longer than the page can send: begin a new one.";
    say(error.name === "AbortError" ? "Stopped: this message is forgotten." : tooLong || error.message);
    if (!message.value) message.value = text;
  }
  controller = null;
  busy(false);
  message.focus();
});

message.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("send").requestSubmit();
  }
});
byId("stop").addEventListener("click", () => controller?.abort());
byId("again").addEventListener("click", begin);
byId("variant").addEventListener("change", begin);
byId("beside")?.addEventListener("change", begin);
