/* Files for the chat page: a file dropped or pasted anywhere is attached to the question, and never makes the browser leave the page.
   If a file cannot be attached, the page says so and holds the question back until the visitor has read that: no question is
   answered without its file unnoticed. */
(() => {
  const MOST_BYTES = 64 * 2 ** 20;  // per file; the server has the same limit
  const SETTLED_MS = 3000;  // most time from an upload's end until its file is in the box
  const filesOf = event => [...((event.dataTransfer || event.clipboardData || event.target).files || [])];
  const inQuestion = event => event.target.closest?.("#question");
  const writesText = event => event.target.closest?.("input, textarea, [contenteditable=true]");
  const carriesFiles = event => [...(event.dataTransfer?.types || [])].includes("Files");
  let refused = "", uploads = 0, waiting = false;  // why the last file was not attached; running uploads; whether a question waits for them

  function say(text) {
    const place = document.querySelector("#refused");
    if (place) place.textContent = text;
  }

  function refuse(why) {
    refused = why;
    say(why && `Nothing was attached: ${why}`);
  }

  /* Runs before gradio sees the files: gradio would only briefly say that a file is too large, and answer without it. */
  function refuseLarge(event) {
    const files = inQuestion(event) ? filesOf(event) : [];
    if (!files.length) return;
    const large = files.filter(file => file.size > MOST_BYTES).map(file => file.name);
    refuse(large.length ? `${large.join(", ")} is larger than 64 MiB. Scale it down, and attach again.` : "");
    if (!large.length) return;
    event.preventDefault();
    event.stopImmediatePropagation();
    if (event.type === "change") event.target.value = "";
  }

  /* Files that gradio did not accept. */
  function attach(event) {
    const pasted = event.type === "paste";
    if (event.defaultPrevented || (pasted ? inQuestion(event) || !filesOf(event).length : writesText(event) && !carriesFiles(event))) return;
    event.preventDefault();
    const files = filesOf(event), input = document.querySelector("#question input[type=file]");
    if (!files.length) return refuse("what was dropped is not a file. Save the picture, and drop the file.");
    if (!input) return refuse("the page is not ready yet. Drop it again in a moment.");
    if (!input.closest("#question").offsetParent) document.querySelector("[role=tab]")?.click();  // makes the message visible
    const carried = new DataTransfer();
    files.forEach(file => carried.items.add(file));
    input.files = carried.files;
    input.dispatchEvent(new Event("change", {bubbles: true}));
  }

  function asks(event) {
    if (event.type === "click") return event.target.closest?.("#question [data-testid=submit-button]");
    return event.key === "Enter" && !event.shiftKey && event.target.closest?.("#question textarea");
  }

  function hold(event) {
    if (event.target.closest?.("#forget")) return refuse("");
    if (!asks(event)) return;
    if (!uploads && !refused) return say("");
    event.preventDefault();
    event.stopImmediatePropagation();
    waiting = uploads > 0;
    say(waiting ? "Waiting for the upload; then the question is sent." : `Not sent, because nothing was attached: ${refused} Send it again to ask without the file.`);
    if (!waiting) refused = "";
  }

  /* A file is in the box, or never will be: sends the question that was held back. */
  function arrived() {
    uploads -= 1;
    if (uploads || !waiting) return;
    waiting = false;
    if (!refused) document.querySelector("#question [data-testid=submit-button]")?.click();
  }

  const attached = () => document.querySelectorAll("#question [role=listitem]").length;
  const later = (done, since, before) =>
    setTimeout(() => attached() > before || Date.now() - since > SETTLED_MS ? done() : later(done, since, before), 50);
  const fetched = window.fetch;
  window.fetch = async (...request) => {
    if (!/\/upload(\?|$)/.test(request[0]?.url ?? request[0])) return fetched(...request);
    const before = attached();
    uploads += 1;
    try {
      const answer = await fetched(...request);
      if (!answer.ok) refuse(`the page's server refused it (HTTP ${answer.status}). Attach it again.`);
      return answer;
    } catch (error) {
      refuse("it cannot be read, or the page's server cannot be reached. Attach it again.");
      throw error;
    } finally {
      refused ? arrived() : later(arrived, Date.now(), before);
    }
  };

  ["drop", "paste", "change"].forEach(name => window.addEventListener(name, refuseLarge, true));
  ["keypress", "click"].forEach(name => window.addEventListener(name, hold, true));
  ["dragenter", "dragover"].forEach(name => window.addEventListener(name, event => {
    if (carriesFiles(event) || !writesText(event)) event.preventDefault();
  }));
  ["drop", "paste"].forEach(name => window.addEventListener(name, attach));
})();
