/* Files for the chat page: dropped anywhere they are attached to the question, and none of them makes the browser leave the page.
   What cannot be attached is said, and stays said until something else is attached. */
(() => {
  const MOST_BYTES = 64 * 2 ** 20;  // of one file; the server has the same limit
  const filesOf = event => [...((event.dataTransfer || event.clipboardData || event.target).files || [])];
  const inQuestion = event => event.target.closest?.("#question");
  const writesText = event => event.target.closest?.("input, textarea, [contenteditable=true]");
  const carriesFiles = event => [...(event.dataTransfer?.types || [])].includes("Files");

  function say(text) {
    const place = document.querySelector("#refused");
    if (place) place.textContent = text;
  }

  /* Before gradio sees them: it would say in passing that a file is too large, and answer without it. */
  function refuseLarge(event) {
    const files = inQuestion(event) ? filesOf(event) : [];
    if (!files.length) return;
    const large = files.filter(file => file.size > MOST_BYTES).map(file => file.name);
    say(large.length ? `Nothing was attached: ${large.join(", ")} is larger than 64 MiB. Scale it down, and attach again.` : "");
    if (!large.length) return;
    event.preventDefault();
    event.stopImmediatePropagation();
    if (event.type === "change") event.target.value = "";
  }

  /* What gradio has not taken. */
  function attach(event) {
    if (event.defaultPrevented || (writesText(event) && !carriesFiles(event))) return;
    event.preventDefault();
    const files = filesOf(event), input = document.querySelector("#question input[type=file]");
    if (!files.length) return say("Nothing was attached: what was dropped is no file. Save the picture, and drop the file.");
    if (!input) return say("Nothing was attached: the page is not ready yet. Drop it again in a moment.");
    if (!input.closest("#question").offsetParent) document.querySelector("[role=tab]")?.click();  // where it can be seen
    const carried = new DataTransfer();
    files.forEach(file => carried.items.add(file));
    input.files = carried.files;
    input.dispatchEvent(new Event("change", {bubbles: true}));
  }

  ["drop", "paste", "change"].forEach(name => window.addEventListener(name, refuseLarge, true));
  ["dragenter", "dragover"].forEach(name => window.addEventListener(name, event => {
    if (carriesFiles(event) || !writesText(event)) event.preventDefault();
  }));
  window.addEventListener("drop", attach);
})();
