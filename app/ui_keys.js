/* Keys, names, theme and confirmations of the chat page. Esc stops an answer; Ctrl or Cmd with Shift and O begins a new conversation. */
(() => {
  const kept = "vismoe-theme", dark = matchMedia("(prefers-color-scheme: dark)");
  const theme = () => localStorage.getItem(kept) || "system";
  const inUse = "[role=listbox][aria-expanded=true], #conversation textarea";  // where Esc has its own meaning

  function paint() {
    const wanted = theme() === "dark" || (theme() === "system" && dark.matches), choice = document.querySelector("#theme");
    if (choice) choice.value = theme();
    if (document.body.classList.contains("dark") !== wanted) document.body.classList.toggle("dark", wanted);
  }

  /* gradio gives these no name. */
  function name() {
    document.querySelectorAll("#conversation button:not([aria-label]) img").forEach(image => {
      image.closest("button").setAttribute("aria-label", `Enlarge picture ${decodeURIComponent(image.src.split("/").pop())}`);
    });
    document.querySelector("#question textarea:not([aria-label])")?.setAttribute("aria-label", "Your question");
  }

  window.vismoe = {paint};  // the switch calls it once it is drawn
  function watch() {
    paint();
    name();
    new MutationObserver(name).observe(document.body, {childList: true, subtree: true});
    new MutationObserver(paint).observe(document.body, {attributes: true, attributeFilter: ["class"]});  // gradio sets it, too
  }
  document.body ? watch() : document.addEventListener("DOMContentLoaded", watch);
  dark.addEventListener("change", paint);
  window.addEventListener("storage", paint);
  document.addEventListener("change", event => {
    if (event.target.id !== "theme") return;
    localStorage.setItem(kept, event.target.value);
    paint();
  });

  window.addEventListener("keydown", event => {
    if (event.key === "Escape" && !event.target.closest?.(inUse)) document.querySelector("#question .stop-button")?.click();
    if (event.code !== "KeyO" || !event.shiftKey || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    document.querySelector("#forget")?.click();
  }, true);

  window.addEventListener("click", event => {
    const clears = event.target.closest?.("#conversation [aria-label='Clear']"), leaves = clears || event.target.closest?.("#forget");
    if (!leaves || !document.querySelector("#conversation [data-testid=user]")) return;
    const question = clears ? "Delete this conversation?" : "Begin a new conversation? The last answer of this one is not kept.";
    if ((!clears && window.vismoe.isKept()) || confirm(question)) return clears && window.vismoe.removeOpen();
    event.preventDefault();
    event.stopImmediatePropagation();
  }, true);
})();
