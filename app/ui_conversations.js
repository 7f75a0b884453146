/* The conversations of this browser: kept in its IndexedDB, listed, opened, renamed, deleted and exported. The server gets one only
   when it is opened. Each is stored under its own id; one that another window has changed meanwhile is stored as a copy. */
window.vismoe.conversations = (element, props, restore, watch) => {
  const OPEN = "vismoe-open", MOST_TITLE = 60;
  const shelf = element.querySelector("details"), list = element.querySelector("ul"), note = element.querySelector(".vm-error");
  const known = new Map(), copies = new Map(), fetched = new Map(), deleted = new Set();  // versions, ids of copies, pictures, ids
  const others = new BroadcastChannel("vismoe");
  let current = "", work = Promise.resolve();

  const result = request => new Promise((done, fail) => Object.assign(request, {onsuccess: () => done(request.result), onerror: () => fail(request.error)}));
  const asking = indexedDB.open("vismoe", 1);
  asking.onupgradeneeded = () => ["titles", "records"].forEach(name => asking.result.createObjectStore(name, {keyPath: "id"}));
  const database = result(asking);
  const stores = async mode => {
    const all = (await database).transaction(["titles", "records"], mode);
    return [all.objectStore("titles"), all.objectStore("records")];
  };
  const answering = () => document.querySelector("#question .stop-button");
  const newId = () => crypto.randomUUID().replaceAll("-", "");

  /* One step after the other; an error is shown. */
  function then(step) {
    work = work.then(step).then(() => { note.textContent = ""; }).catch(error => {
      note.textContent = `The browser's store of conversations: ${error.message || error}`;
    });
    return work;
  }

  async function picture(path) {
    if (!fetched.has(path)) {
      const answer = await fetch(`gradio_api/file=${path.split("/").map(encodeURIComponent).join("/")}`);
      if (!answer.ok) throw new Error(`a picture cannot be read (HTTP ${answer.status})`);
      const reader = new FileReader(), read = new Promise((done, fail) => Object.assign(reader, {onload: done, onerror: fail}));
      reader.readAsDataURL(await answer.blob());
      await read;
      fetched.set(path, {name: path.split("/").pop(), data: reader.result});
    }
    return fetched.get(path);
  }

  async function keep(record) {
    if (deleted.has(record.id)) return;
    const turns = [];
    for (const {files, ...turn} of record.turns) turns.push({...turn, pictures: await Promise.all(files.map(picture))});
    const [titles, records] = await stores("readwrite");
    let id = copies.get(record.id) || record.id, before = await result(titles.get(id));
    if (before && before.version !== known.get(id)) {
      copies.set(record.id, id = newId());
      before = undefined;
    }
    const version = newId(), title = before?.title || record.turns[0].question.trim().slice(0, MOST_TITLE);
    titles.put({id, title, version, changed: Date.now()});
    await result(records.put({id, system: record.system, turns}));
    known.set(id, version);
    if (id === current && list.querySelector("button")?.dataset.id === id) others.postMessage("changed");  // the list stays, with its focus
    else show(id);
  }

  async function draw() {
    const [titles] = await stores("readonly"), all = await result(titles.getAll());
    list.replaceChildren(...all.sort((one, other) => other.changed - one.changed).map(({id, title}) => {
      const button = Object.assign(document.createElement("button"), {textContent: title, title, onclick: () => open(id)});
      button.dataset.id = id;
      if (id === current) button.setAttribute("aria-current", "true");
      const item = document.createElement("li");
      item.append(button);
      return item;
    }));
    element.querySelectorAll("[data-action]").forEach(button => { button.disabled = !current; });
  }

  function show(id) {
    current = id;
    sessionStorage.setItem(OPEN, id);
    others.postMessage("changed");
    return draw();
  }

  function open(id) {
    if (id === current || (answering() && !confirm("Stop the answer that is being written, and leave it?"))) return;
    sessionStorage.removeItem(OPEN);  // a record that cannot be opened is not opened again at every reload
    then(async () => {
      const [titles, records] = await stores("readonly"), [about, record] = await Promise.all([result(titles.get(id)), result(records.get(id))]);
      if (!about || !record) return draw();
      known.set(id, about.version);
      copies.delete(id);
      restore(record);
      if (!matchMedia("(min-width: 900px)").matches) shelf.open = false;
    });
  }

  async function remove(id) {
    const [titles, records] = await stores("readwrite");
    deleted.add(id);
    titles.delete(id);
    await result(records.delete(id));
    await show("");
  }

  function asMarkdown({title, turns, system}) {
    const said = turns.map(turn => [
      "## Question", ...turn.pictures.map(({name}) => `*Picture: ${name}*`), turn.question,
      "## Answer", turn.reasoning && `<details><summary>Thinking</summary>\n\n${turn.reasoning}\n\n</details>`, turn.answer,
    ].filter(Boolean).join("\n\n"));
    return [`# ${title}`, system && `System prompt: ${system}`, ...said].filter(Boolean).join("\n\n") + "\n";
  }

  async function act(action) {
    const [titles, records] = await stores("readonly"), [about, record] = await Promise.all([result(titles.get(current)), result(records.get(current))]);
    if (!about) return;
    if (action === "rename") {
      const title = prompt("Name of the conversation", about.title)?.trim().slice(0, MOST_TITLE);
      if (!title) return;
      const [changing] = await stores("readwrite");
      await result(changing.put({...about, title}));
      return show(current);
    }
    const whole = {title: about.title, ...record}, json = action === "json";
    const link = Object.assign(document.createElement("a"), {
      href: URL.createObjectURL(new Blob([json ? JSON.stringify(whole, null, 1) : asMarkdown(whole)], {type: json ? "application/json" : "text/markdown"})),
      download: `${about.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "") || "conversation"}.${json ? "json" : "md"}`,
    });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  element.querySelectorAll("[data-action]").forEach(button => button.addEventListener("click", () => {
    if (button.dataset.action === "delete") document.querySelector("#conversation [aria-label='Clear']")?.click();  // it is confirmed there
    else then(() => act(button.dataset.action));
  }));
  watch("value", () => {
    const told = JSON.parse(props.value || "{}");
    then(() => told.turns ? keep(told) : show(told.opened));
  });
  others.onmessage = () => then(draw);
  window.vismoe.isKept = () => Boolean(current) && !answering();
  window.vismoe.removeOpen = () => current && then(() => remove(current));

  shelf.open = matchMedia("(min-width: 900px)").matches;
  then(draw);
  const last = sessionStorage.getItem(OPEN);
  if (last) open(last);
};
