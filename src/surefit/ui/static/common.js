// What the pages' scripts share: posting to our own server, and not asking at every key.
const csrf = document.querySelector('meta[name="csrf"]').content;

export const byId = (id) => document.getElementById(id);

async function send(address, body, signal) {
  const answer = await fetch(address, {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-CSRF-Token": csrf },
    body: JSON.stringify(body),
    signal,
  });
  if (answer.ok) return answer;
  const isJson = (answer.headers.get("Content-Type") ?? "").startsWith("application/json");
  const content = isJson ? await answer.json() : { error: await answer.text() };
  const message = [content.error, content.help].filter(Boolean).join(": ");
  throw Object.assign(new Error(message), { status: answer.status });
}

export async function post(address, body, signal) {
  return (await send(address, body, signal)).json();
}

// Calls `heard` with each line of the answer, as it arrives.
export async function stream(address, body, signal, heard) {
  const answer = await send(address, body, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) heard(JSON.parse(line));
  }
}

// Calls `ask(signal)` once nothing has happened for `wait` ms; a newer call takes the place of the one under way.
export function latest(wait, ask) {
  let timer, controller;
  return () => {
    clearTimeout(timer);
    controller?.abort();
    timer = setTimeout(async () => {
      controller = new AbortController();
      try {
        await ask(controller.signal);
      } catch (error) {
        if (error.name !== "AbortError") throw error;
      }
    }, wait);
  };
}

export function element(name, text, attributes = {}) {
  const made = document.createElement(name);
  if (text != null) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

// Makes a text the content of a node, with what is between backquotes as code.
export function ticked(node, text) {
  node.replaceChildren();
  node.append(...text.split("`").map((part, i) => (i % 2 ? element("code", part) : part)));
  return node;
}

// Sends a file as it is; `progress` gets the percentage. fetch cannot tell how far an upload is.
export function upload(file, progress) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("POST", `/api/upload?${new URLSearchParams({ name: file.name })}`);
    request.setRequestHeader("X-CSRF-Token", csrf);
    request.responseType = "text";
    request.upload.addEventListener("progress", ({ loaded, total }) => progress(Math.floor((100 * loaded) / total)));
    request.addEventListener("error", () => reject(new Error("The upload failed; nothing of it was kept.")));
    request.addEventListener("load", () => {
      let content = { error: request.responseText };
      try { content = JSON.parse(request.responseText); } catch { /* a plain text */ }
      if (request.status === 200) resolve(content); else reject(new Error(content.error));
    });
    request.send(file);
  });
}

// Quotes a word of a command that is shown, where a shell would read it otherwise.
export const quoted = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`);

// Asks before something is started or stopped; resolves to whether the user agreed.
export function confirmed(title, text, command, yes) {
  const dialog = byId("confirm");
  byId("confirm-title").textContent = title;
  byId("confirm-text").textContent = text;
  byId("confirm-command").textContent = command;
  byId("confirm-yes").textContent = yes;
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

// Starts a config once the user agrees, and goes to its run; a refusal is said in `status`.
export async function confirmRun(config, status) {
  const text = "It takes all stages in order on this machine: check, plan, train, merge, evaluate, report. It goes on if you close this page.";
  if (!(await confirmed("Start this run?", text, `surefit run ${quoted(config)}`, "Start"))) return;
  try {
    const { run } = await post("/api/start", { config });
    location.assign(`/run?${new URLSearchParams({ path: run })}`);
  } catch (error) {
    ticked(status, error.message);
  }
}
