// Opens the folded part that the address or a link names, and on paper everything but the examples and whole prompts.
// A search of the browser opens what it finds in a closed part by itself.
(() => {
  "use strict";
  const reveal = (hash) => {
    const target = document.getElementById(hash.slice(1));
    for (let part = target?.closest("details"); part; part = part.parentElement.closest("details")) part.open = true;
    return target;
  };

  addEventListener("click", (event) => reveal(event.target.closest?.("a[href^='#']")?.hash ?? ""));
  addEventListener("hashchange", () => reveal(location.hash)?.scrollIntoView());
  reveal(location.hash)?.scrollIntoView();

  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open], .prompt, .example)")];
    opened.forEach((details) => (details.open = true));
    document.documentElement.classList.add("printing");
  });
  addEventListener("afterprint", () => {
    opened.forEach((details) => (details.open = false));
    document.documentElement.classList.remove("printing");
  });
})();
