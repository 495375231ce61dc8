// What the pages' scripts share: posting to our own server, and not asking at every key.
const csrf = document.querySelector('meta[name="csrf"]').content;

export const byId = (id) => document.getElementById(id);

export async function post(address, body, signal) {
  const answer = await fetch(address, {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-CSRF-Token": csrf },
    body: JSON.stringify(body),
    signal,
  });
  const isJson = (answer.headers.get("Content-Type") ?? "").startsWith("application/json");
  const content = isJson ? await answer.json() : { error: await answer.text() };
  if (!answer.ok) throw new Error([content.error, content.help].filter(Boolean).join(": "));
  return content;
}

// Calls `ask(signal)` once nothing has happened for `wait` ms; a newer call takes the place of the one under way.
export function latest(wait, ask) {
  let timer, controller;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(async () => {
      controller?.abort();
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
