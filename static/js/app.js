/* Small conveniences on top of pages that work without them: theme, search key, copy, live stamps. */
"use strict";

/** Apply and remember a theme without a reload; the server reads the cookie at the next page. */
function chooseTheme(theme) {
  const root = document.documentElement;
  if (theme === "system") delete root.dataset.theme;
  else root.dataset.theme = theme;
  const [prefix, secure] = location.protocol === "https:" ? ["__Host-", "; secure"] : ["", ""];
  document.cookie = `${prefix}theme=${theme}; path=/; max-age=31536000; samesite=lax${secure}`;
  for (const button of document.querySelectorAll("[data-theme-switch] button")) {
    button.setAttribute("aria-pressed", String(button.value === theme));
  }
  document.dispatchEvent(new CustomEvent("slipway:theme", { detail: { theme } }));
}

/* What passes by itself is asked for again, unless somebody is typing. */
const passing = document.querySelector("[data-reload-ms]");
if (passing) {
  setInterval(() => {
    if (!document.activeElement?.matches("input, select, textarea")) location.reload();
  }, Number(passing.dataset.reloadMs));
}

/* Parts of a long page as tabs: the one that the address names, or that holds what it names. */
const parts = [...document.querySelectorAll("[data-tab]")];
let shownPart = null;
function showPart() {
  const named = location.hash.length > 1 ? document.getElementById(location.hash.slice(1)) : null;
  const shown = named?.closest("[data-tab]") ?? shownPart ?? parts[0];
  shownPart = shown;
  for (const part of parts) part.hidden = part !== shown;
  for (const link of document.querySelectorAll("[data-tabs] a")) {
    if (link.hash === `#${shown.id}`) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
  if (named && named !== shown) named.scrollIntoView();
}
if (parts.length) {
  showPart();
  addEventListener("hashchange", showPart);
}

/* Of tabs that do not fit, the current one is in view. */
for (const tab of document.querySelectorAll(".tabs [aria-current]")) {
  tab.parentElement.scrollLeft = tab.offsetLeft - tab.parentElement.offsetLeft;
}

/* Filters of a list take effect as they are chosen; a text when it is entered. */
document.addEventListener("change", (event) => {
  if (event.target.matches("[data-submits] select")) event.target.form.requestSubmit();
});

document.addEventListener("submit", (event) => {
  const form = event.target;
  if (form.matches("[data-theme-switch]") && event.submitter) {
    event.preventDefault();
    chooseTheme(event.submitter.value);
  }
});

document.addEventListener("click", (event) => {
  const copy = event.target.closest("[data-copy]");
  if (copy) copyText(copy);
  for (const menu of document.querySelectorAll("details.menu[open]")) {
    if (!menu.contains(event.target)) menu.open = false;
  }
});

/* A page counts its changes, so that a request which a later one overtook writes nothing. */
for (const kind of ["input", "change"]) {
  document.addEventListener(kind, (event) => {
    const turn = event.target.form?.querySelector("[data-turn]");
    if (turn) turn.value = Number(turn.value) + 1;
  }, true);
}

/** Copy the text of the element that `data-copy` names, and say so on the button. */
async function copyText(button) {
  const source = document.querySelector(button.dataset.copy);
  const word = button.textContent;
  try {
    await navigator.clipboard.writeText(source.textContent.trim());
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(source);
    button.textContent = "Selected";
  }
  setTimeout(() => { button.textContent = word; }, 1500);
}

/** Of rows that repeat show those that are filled and one more, two at least; a button adds one. */
for (const rows of document.querySelectorAll("[data-rows]")) {
  const all = [...rows.querySelectorAll("[data-row]")];
  const more = rows.querySelector("[data-more]");
  const isFilled = (row) => [...row.querySelectorAll("input, select")].some((each) => each.value);
  const show = (count) => {
    all.forEach((row, at) => { row.hidden = at >= count; });
    more.hidden = count >= all.length;
  };
  let count = Math.max(2, all.findLastIndex(isFilled) + 2);
  show(count);
  more.addEventListener("click", () => {
    count += 1;
    show(count);
    all[count - 1].querySelector("select, input").focus();
  });
}

const JUMPS = {
  h: "/", p: "/plans/", l: "/limits/", j: "/jobs/", s: "/deployments/", q: "/queue/", o: "/hosts/",
  m: "/models/", t: "/techniques/", d: "/docs/",
};

/* The palette: what is typed is sought as it is typed; arrows choose, Enter goes there. */
const palette = document.getElementById("palette");
if (palette) {
  const input = palette.querySelector("input");
  const popup = new slipway.ListPopup(input, palette.querySelector("[role=listbox]"));
  let asked = 0;
  let answered = null; /* the text that the list answers */
  let isEntered = false; /* Enter was pressed before the answer came */
  const seek = async () => {
    const turn = ++asked;
    const sought = input.value;
    const answer = await fetch(`${input.dataset.search}?${new URLSearchParams({ q: sought })}`, { headers: { "HX-Request": "true" } }).catch(() => null);
    const text = answer?.ok ? await answer.text() : "";
    if (turn !== asked) return; /* a later letter was typed */
    answered = sought;
    const found = new DOMParser().parseFromString(text, "text/html").body;
    popup.show([...document.importNode(found, true).childNodes]);
    if (isEntered && palette.open && sought === input.value) follow(popup.options[0]);
    if (sought === input.value) isEntered = false;
  };
  const follow = (entry) => { if (entry) location.assign(entry.href); };
  let waiting = 0;
  input.addEventListener("input", () => { isEntered = false; clearTimeout(waiting); waiting = setTimeout(seek, 120); });
  input.addEventListener("keydown", (event) => {
    if (event.isComposing) return; /* Enter ends the composition of a word */
    if (popup.moved(event) || event.key !== "Enter") return;
    event.preventDefault();
    if (answered === input.value) follow(popup.active);
    else isEntered = true;
  });
  document.addEventListener("keydown", (event) => {
    if (event.key.toLowerCase() !== "k" || !(event.metaKey || event.ctrlKey)) return;
    event.preventDefault();
    if (palette.open) palette.close();
    else { input.value = ""; answered = null; isEntered = false; popup.show([]); palette.showModal(); input.focus(); slipway.painted(seek); }
  });
  for (const dialog of document.querySelectorAll("dialog.palette")) {
    dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  }
}
let lastKey = { key: "", at: 0 };

/** `/` focuses search, `g` then a letter jumps, Escape closes the menu. */
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    for (const menu of document.querySelectorAll("details.menu[open]")) {
      menu.open = false;
      menu.querySelector("summary").focus();
    }
  }
  const isTyping = event.target.closest("input, textarea, select, [contenteditable]");
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "?") document.getElementById("keys")?.showModal();
  if (event.key === "/") {
    const search = document.querySelector('[data-hotkey="/"]');
    if (search) { event.preventDefault(); search.focus(); search.select(); }
  }
  const isJump = lastKey.key === "g" && event.timeStamp - lastKey.at < 1000;
  if (isJump && JUMPS[event.key]) location.assign(JUMPS[event.key]);
  lastKey = { key: event.key, at: event.timeStamp };
});

/** Hide the fields of a step that its other choices leave unread, unless they hold an error. */
function hideUnasked() {
  for (const control of document.querySelectorAll("#step [data-asked-for]")) {
    const field = control.closest(".field");
    const isAsked = control.dataset.askedFor.split(" ").every((condition) => {
      const [name, values] = condition.split("=");
      const other = document.querySelector(`#step [name='${name}']`);
      return !other || values.split(",").includes(other.value);
    });
    field.hidden = !isAsked && !field.querySelector(".error");
  }
}
hideUnasked();

/* An answer to a form as it was before its latest change is not put in its place: the next one
   is on its way, and the swap would undo what was chosen meanwhile. */
const changedAt = new WeakMap(); /* form -> instant of its latest change */
const askedAt = new WeakMap(); /* request -> instant at which it was sent */
for (const name of ["input", "change"]) {
  document.addEventListener(name, (event) => {
    if (event.target.form) changedAt.set(event.target.form, performance.now());
  });
}
document.addEventListener("htmx:before:request", (event) => askedAt.set(event.detail.ctx, performance.now()));
document.addEventListener("htmx:before:swap", (event) => {
  const { ctx } = event.detail;
  if (ctx.sourceElement?.getAttribute("hx-swap") !== "outerMorph") return;
  if (changedAt.get(ctx.sourceElement) > askedAt.get(ctx)) event.preventDefault();
});

/* A change that is saved ends the errors that the page was loaded with. */
document.addEventListener("htmx:after:swap", () => {
  if (document.querySelector("#errors:not(:empty)")) return;
  for (const error of document.querySelectorAll("#step .error")) error.remove();
  for (const field of document.querySelectorAll("#step [aria-invalid]")) field.removeAttribute("aria-invalid");
});
document.addEventListener("change", (event) => {
  if (event.target.matches("#step [name]")) hideUnasked();
});

/* The last lines of a log are at its end; of a job that runs, live lines follow. */
for (const log of document.querySelectorAll(".log.follow")) log.scrollTop = log.scrollHeight;

/* The documentation's list is longer than the window: the open page's line is moved into view. */
{
  const list = document.querySelector(".docs > nav:first-child");
  const open = list?.querySelector("[aria-current]");
  if (open && list.scrollHeight > list.clientHeight) list.scrollTop = open.offsetTop - list.clientHeight / 2;
}

/* So is the chosen one of tabs that are wider than a phone. */
for (const tabs of document.querySelectorAll(".tabs")) {
  const open = tabs.querySelector("[aria-current]");
  if (open && tabs.scrollWidth > tabs.clientWidth) tabs.scrollLeft = open.offsetLeft - tabs.offsetLeft;
}
