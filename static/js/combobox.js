/* Fields to type in with a list below them, after the pattern "combobox" of the ARIA practices
   (w3.org/WAI/ARIA/apg/patterns/combobox): the focus stays in the field, aria-activedescendant
   names the option that Enter takes. Without this script the select elements work as they are. */
"use strict";

globalThis.slipway ??= {};

{
/** The list of a field: which option is active, and the keys that change it. */
slipway.ListPopup = class {
  constructor(input, list) {
    this.input = input;
    this.list = list;
  }

  get options() { return [...this.list.querySelectorAll("[role=option]")]; }

  get active() { return this.list.querySelector("[role=option][aria-selected=true]"); }

  /** Show these nodes with one option active, the first unless another is named. */
  show(nodes, active = null) {
    this.list.replaceChildren(...nodes);
    this.number();
    this.activate(active ?? this.options[0]);
  }

  /** Name the options by their place, those that were added too. */
  number() {
    this.options.forEach((each, at) => {
      each.id = `${this.list.id}-${at}`;
      if (!each.ariaSelected) each.setAttribute("aria-selected", "false");
    });
  }

  activate(option) {
    for (const each of this.options) each.setAttribute("aria-selected", String(each === option));
    if (option) this.input.setAttribute("aria-activedescendant", option.id);
    else this.input.removeAttribute("aria-activedescendant");
    option?.scrollIntoView({ block: "nearest" });
  }

  /** Follow an arrow or page key, and return whether it was one. */
  moved(event) {
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10 }[event.key];
    const all = this.options;
    if (!step || event.altKey || !all.length) return false;
    event.preventDefault();
    const at = all.indexOf(this.active) + step;
    const isPage = Math.abs(step) > 1;
    this.activate(all[isPage ? Math.min(all.length - 1, Math.max(0, at)) : (at + all.length) % all.length]);
    return true;
  }
};

/** Do something after the next frame: what a key or a click shows is not kept waiting by it. */
slipway.painted = (act) => requestAnimationFrame(() => setTimeout(act));

const MOST_OPTIONS = 40; /* drawn; more are found by typing */
const FIRST_OPTIONS = 12; /* as many as are seen: a key or a click is answered before the others */
const SERVER = 8; /* devices of one machine, from which on whole machines are meant */
const SEVERAL = [/^(\d{1,4})\s*[x×*]\s*(.*)$/i, /^(.+?)\s*[x×*]\s*(\d{1,4})$/i];
const notesOf = new Map(); /* kind -> promise of what is said beside the options */

/** Return a number of devices and the rest of a text such as "4x a100"; one of any other text. */
function severalIn(text) {
  const [before, after] = SEVERAL.map((form) => form.exec(text.trim()));
  if (before) return { count: Number(before[1]) || 1, rest: before[2] };
  return after ? { count: Number(after[2]) || 1, rest: after[1] } : { count: 1, rest: text };
}

function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** Make a field of a select element, which stays in the form, hidden, and is what is sent. */
function enhance(select) {
  const { notes: kind, count: countId, nodes: nodesId, example, free } = select.dataset;
  const key = select.id;
  select.id = `${key}-options`;
  select.hidden = true;
  const list = element("div", { id: `${key}-list`, role: "listbox", class: "options" });
  const label = document.querySelector(`label[for="${key}"]`);
  if (label) list.setAttribute("aria-label", label.textContent);
  list.hidden = true;
  const input = element("input", {
    id: key, type: "text", class: "input", role: "combobox", autocomplete: "off", spellcheck: "false",
    autocapitalize: "off", "aria-autocomplete": "list", "aria-expanded": "false", "aria-controls": list.id,
    placeholder: example ?? "",
  });
  for (const name of ["aria-describedby", "aria-invalid"]) {
    if (select.hasAttribute(name)) input.setAttribute(name, select.getAttribute(name));
  }
  select.after(input, list);
  const popup = new slipway.ListPopup(input, list);
  let notes = { groups: {}, notes: {} };
  let hasNotes = false;
  let isTyped = false;

  const chosenWords = () => select.selectedOptions[0]?.label ?? "";
  /* What is chosen stands in the field, selected where the focus is: what is typed replaces it. */
  const reset = () => {
    input.value = chosenWords();
    isTyped = false;
    if (document.activeElement === input) input.select();
  };
  reset();

  const words = (option) => `${option.label} ${option.value} ${option.parentElement.label ?? ""}`.toLowerCase();
  const all = [...select.options].map((option) => ({ option, text: words(option) }));
  const byValue = new Map(all.map((each) => [each.option.value, each]));

  /** The options by group: recent and owned ones first, then in the order of the select element. */
  function groups(sought) {
    const parts = sought.toLowerCase().split(/\s+/).filter(Boolean);
    const isMeant = (each) => parts.every((part) => each.text.includes(part));
    const found = new Map();
    const seen = new Set();
    const add = (name, each) => {
      if (!each || seen.has(each) || !isMeant(each)) return;
      seen.add(each);
      found.set(name, [...(found.get(name) ?? []), each.option]);
    };
    if (!sought) add("Chosen", byValue.get(select.value));
    for (const [name, values] of Object.entries(notes.groups)) values.forEach((value) => add(name, byValue.get(value)));
    for (const each of all) add(each.option.parentElement.label ?? "", each);
    return { found, size: seen.size };
  }

  function row(option, count) {
    const several = count > 1 && !option.value.startsWith("host:") ? `${count} × ` : "";
    const said = option.dataset.more && several ? `${option.dataset.more} each` : option.dataset.more;
    const more = [said, notes.notes[option.value]].filter(Boolean).join(" · ");
    const made = element("div", { role: "option" }, element("span", {}, several + option.label));
    if (more) made.append(element("span", { class: "faint" }, more));
    made.slipwayChoice = { option, count: several ? count : null };
    return made;
  }

  /** Draw the options that what was typed means, those below the visible ones after these are
      shown; the one named stays active. */
  let turn = 0;
  function draw(kept = null) {
    const mine = ++turn;
    list.replaceChildren();
    grow(kept ? MOST_OPTIONS : FIRST_OPTIONS);
    popup.show([...list.children], kept && popup.options.find((each) => each.slipwayChoice.option === kept));
    if (!kept) slipway.painted(() => { if (mine === turn && !list.hidden) { grow(MOST_OPTIONS); popup.number(); } });
  }

  /** Add what the list of so many options lacks, in their order: what is there stays as it is. */
  function grow(most) {
    const typed = isTyped ? input.value : "";
    const { count, rest } = countId ? severalIn(typed) : { count: 1, rest: typed };
    const { found, size } = groups(rest);
    const drawn = [...list.querySelectorAll("[role=group]")];
    let left = most;
    for (const [name, options] of found) {
      if (!left) break;
      let group = drawn.shift();
      if (!group) {
        group = element("div", { role: "group", "aria-label": name }, element("div", { class: "group", "aria-hidden": "true" }, name));
        list.append(group);
      }
      const shown = options.slice(0, left);
      left -= shown.length;
      group.append(...shown.slice(group.children.length - 1).map((option) => row(option, count)));
    }
    if (size > most && most === MOST_OPTIONS) list.append(element("p", { class: "quiet" }, `${size - most} more: type a part of the name`));
    if (!size && !list.children.length) list.append(element("p", { class: "quiet" }, free === undefined ? "Nothing has these words" : "Not in the catalog: sent as typed"));
  }

  function open() {
    if (!list.hidden) return;
    list.hidden = false;
    input.setAttribute("aria-expanded", "true");
    draw();
    if (kind && !hasNotes) slipway.painted(learn);
  }

  /** Ask once what is said beside the options, and draw them with it. */
  function learn() {
    if (!notesOf.has(kind)) notesOf.set(kind, fetch(`/choices/${kind}/`).then((answer) => (answer.ok ? answer.json() : notes)).catch(() => notes));
    notesOf.get(kind).then((told) => {
      hasNotes = true;
      notes = told;
      if (!list.hidden) draw(popup.active?.slipwayChoice.option);
    });
  }

  function close() {
    list.hidden = true;
    input.setAttribute("aria-expanded", "false");
    input.removeAttribute("aria-activedescendant");
  }

  const set = (id, value) => {
    const field = document.getElementById(id);
    if (field) field.value = value;
  };

  function choose({ option, count }) {
    if (count) {
      const isServers = count > SERVER && count % SERVER === 0;
      set(countId, isServers ? SERVER : count);
      set(nodesId, isServers ? count / SERVER : 1);
    }
    const isOther = !option.selected || count;
    option.selected = true;
    reset();
    if (isOther) select.dispatchEvent(new Event("change", { bubbles: true }));
  }

  /** Take what stands in the field: an option of that name, the active one, or the text itself. */
  function settle() {
    if (!isTyped) return;
    const typed = input.value.trim();
    const exact = all.find(({ option }) => [option.label, option.value].some((each) => each.toLowerCase() === typed.toLowerCase()));
    if (!typed) reset();
    else if (exact) choose({ option: exact.option });
    else if (!list.hidden && popup.active) choose(popup.active.slipwayChoice);
    else if (free !== undefined) {
      const option = new Option(typed, typed);
      select.append(option);
      choose({ option });
    } else reset();
  }

  input.addEventListener("focus", () => input.select());
  input.addEventListener("click", open);
  input.addEventListener("input", () => {
    isTyped = true;
    open();
    draw();
    const exact = byValue.get(input.value.trim());
    if (exact && !exact.option.selected) {
      exact.option.selected = true;
      select.dispatchEvent(new Event("change", { bubbles: true }));
    }
  });
  input.addEventListener("keydown", (event) => {
    if (event.isComposing) return;
    if (list.hidden) {
      if (event.key === "ArrowDown" || event.key === "ArrowUp") { event.preventDefault(); open(); }
    } else if (event.key === "Enter") {
      event.preventDefault();
      if (popup.active) choose(popup.active.slipwayChoice);
      else settle();
      close();
    } else if (event.key === "Escape") {
      event.preventDefault();
      reset();
      close();
    } else popup.moved(event);
  });
  input.addEventListener("blur", () => { settle(); close(); });
  list.addEventListener("mousedown", (event) => event.preventDefault()); /* the field keeps the focus */
  list.addEventListener("click", (event) => {
    const option = event.target.closest("[role=option]");
    if (!option) return;
    choose(option.slipwayChoice);
    close();
  });
  /* What is typed is no change of the form; what is chosen is. */
  for (const name of ["input", "change"]) input.addEventListener(name, (event) => event.stopPropagation());
}

for (const select of document.querySelectorAll("select[data-combobox]")) enhance(select);
document.addEventListener("htmx:after:swap", () => {
  for (const select of document.querySelectorAll("select[data-combobox]:not([hidden])")) enhance(select);
});
}
