// Filters the examples by kind, set and text. Without this script all of them are there, closed.
(() => {
  "use strict";
  const form = document.getElementById("example-filter");
  const count = document.getElementById("example-count");
  const button = document.getElementById("example-all");
  const examples = [...document.querySelectorAll("details.example")];
  const shown = () => examples.filter((example) => !example.hidden);

  const label = () => {
    button.textContent = shown().every((example) => example.open) ? "Close all" : "Open all";
  };
  const filter = () => {
    const kinds = [...form.querySelectorAll(":checked[name=kind]")].map((box) => box.value);
    const set = form.querySelector("[name=set]")?.value;
    const text = form.querySelector("[name=text]").value.trim().toLowerCase();
    for (const example of examples) {
      const { kind, set: own } = example.dataset;
      const found = kinds.includes(kind) && (!set || own === set);
      example.hidden = !(found && (!text || example.textContent.toLowerCase().includes(text)));
    }
    count.value = `${shown().length} of ${examples.length} shown`;
    label();
  };

  form.addEventListener("input", filter);
  button.addEventListener("click", () => {
    const open = !shown().every((example) => example.open);
    shown().forEach((example) => (example.open = open));
    label();
  });
  examples.forEach((example) => example.addEventListener("toggle", label));
  form.hidden = false;
  filter();
})();
