/* The job page and the job list while they are open: lines into the log, and the regions that the
   server draws. What a frame announces is fetched at the page's own address, so that one template
   says how it looks; one answer brings the state line, the cards, the captions and the points of
   the charts, all of one instant, and they are shown together. */
(() => {
  "use strict";
  const REGION_MS = 1500;
  const FINAL = new Set(["succeeded", "failed", "error", "stopped", "expired"]);
  const { charts, live } = window.slipway;
  const job = document.querySelector("[data-job]");
  const charted = job ?? document.querySelector("[data-charted]"); /* whose charts take new points */
  let pending = 0;
  let fetchedAt = 0;
  let isFinal = job ? FINAL.has(job.dataset.state) : false;

  /* What names a control, so that the focus of a keyboard stays on it when its region is drawn anew. */
  const NAMING = ["id", "name", "value", "href", "formaction", "aria-label", "data-copy"];
  const twinOf = (element, region) => [...region.querySelectorAll(element.localName)].find(
    (each) => NAMING.every((name) => each.getAttribute(name) === element.getAttribute(name)),
  );

  /* The rows of a folded table are drawn when it is unfolded: those of twenty charts took most of an
     answer's time. */
  const isFolded = (region) => region.localName === "tbody" && region.closest("details:not([open])");
  document.addEventListener("toggle", ({ target }) => {
    if (target.open && target.querySelector("tbody[data-region]")) refreshSoon(true);
  }, true);

  /* Regions: each [data-region] takes the children of its namesake, if they differ. */
  const swap = (fresh) => {
    for (const region of document.querySelectorAll("[data-region]")) {
      const other = fresh.querySelector(`[data-region="${region.dataset.region}"]`);
      if (!other) continue;
      region.hidden = other.hidden; /* a card that has had nothing to show until now */
      if (isFolded(region)) continue;
      if (other.innerHTML === region.innerHTML) continue;
      if (region.querySelector("details[open] form")) continue; /* somebody is about to press it */
      const unfolded = [...region.querySelectorAll("details[open][id]")].map((one) => one.id);
      const ticked = [...region.querySelectorAll("input.pick:checked")].map((box) => box.value);
      const focused = region.contains(document.activeElement) ? document.activeElement : null;
      region.replaceChildren(...document.importNode(other, true).childNodes);
      if (focused) twinOf(focused, region)?.focus({ preventScroll: true });
      for (const id of unfolded) document.getElementById(id)?.setAttribute("open", "");
      for (const box of region.querySelectorAll("input.pick")) box.checked = ticked.includes(box.value);
      if (window.htmx && region.querySelector("[hx-get], [hx-post]")) window.htmx.process(region);
    }
    charts?.mount();
    const title = fresh.querySelector("[data-title]");
    if (!title) return;
    document.title = title.dataset.title;
    if (title.dataset.expectedMs) charts?.expect(Number(title.dataset.expectedMs));
  };

  /* The charts take the points of the same answer, and say of which instant they are. */
  const take = (fresh) => {
    const asOf = fresh.querySelector("[data-page-as-of]")?.dataset.pageAsOf ?? fresh.querySelector("[data-job]")?.dataset.asOf;
    const points = fresh.getElementById("fresh-points");
    if (points && charts) {
      for (const [metric, column] of Object.entries(JSON.parse(points.textContent))) charts.append(metric, column);
    }
    if (!asOf || !charted) return;
    charted.dataset.asOf = asOf;
    charts?.show(asOf);
  };

  const load = async (isWhole) => {
    const headers = isWhole ? {} : { "HX-Request": "true" };
    const address = new URL(location.href);
    if (charted && !isWhole && charts?.has()) address.searchParams.set("since", Math.floor(charts.lastInstant()));
    const answer = await fetch(address, { headers, cache: "no-store" });
    if (!answer.ok) return null;
    return new DOMParser().parseFromString(await answer.text(), "text/html");
  };

  /* A page that was opened while the job waited has no charts; the whole page has them. */
  const addCharts = async () => {
    const place = document.querySelector("[data-no-charts]");
    if (!place || stateNow() !== "running") return;
    const found = (await load(true))?.querySelector(".charts");
    if (!found || !place.isConnected) return;
    place.replaceWith(document.importNode(found, true));
    charts?.mount();
  };

  const stateNow = () => document.querySelector("[data-state-now]")?.dataset.stateNow;
  const refresh = async () => {
    pending = 0;
    fetchedAt = Date.now();
    try {
      const fresh = await load(false);
      /* A page that waits for the endpoint is another one once there is one. */
      if (fresh && document.querySelector("[data-awaited]") && !fresh.querySelector("[data-awaited]")) return location.reload();
      if (fresh) { swap(fresh); take(fresh); live.heard(); }
      await addCharts();
    } catch { /* the next frame or poll tries again */ }
    if (job && FINAL.has(stateNow())) finish();
  };

  const refreshSoon = (isUrgent) => {
    if (isUrgent && pending) { clearTimeout(pending); pending = 0; }
    if (pending) return;
    const wait = isUrgent ? 100 : Math.max(100, REGION_MS - (Date.now() - fetchedAt));
    pending = setTimeout(refresh, wait);
  };

  /* What is left of a token's hour. */
  const countDown = () => {
    for (const element of document.querySelectorAll("[data-countdown]")) {
      const left = Math.max(0, Math.round((Date.parse(element.dataset.countdown) - Date.now()) / 1000));
      element.textContent = `${Math.floor(left / 60)}:${String(left % 60).padStart(2, "0")} min`;
      if (left === 0) refreshSoon(false);
    }
  };
  setInterval(countDown, 1000);

  document.addEventListener("live:resync", () => refreshSoon(true));
  document.addEventListener("live:poll", () => refreshSoon(true));

  /* The list needs no more than that. */
  if (!job) {
    document.addEventListener("live:frame", ({ detail }) => refreshSoon(["job.state", "host.check", "server.look"].includes(detail.event)));
    return;
  }

  /* Nothing is sent of a job that waits, but how long it has and what is before it change. */
  const QUEUED_MS = 10_000;
  setInterval(() => { if (stateNow() === "queued") refreshSoon(false); }, QUEUED_MS);

  /* Lines that a frame brings are written at once; after a gap the store is asked. */
  const log = document.querySelector("[data-log]");
  let lastSeq = Number(log?.dataset.lastSeq || 0);

  /* What the supervisor noted stands between the lines of output. */
  const NOTES = {
    started: ({ pid }) => `process ${pid} started`,
    phase: ({ name }) => name,
    artefact: ({ name, total_bytes: bytes }) => `saved ${name}, ${(bytes / 2 ** 20).toFixed(1)} MiB`,
    exited: ({ signal, exit_code: code }) => {
      if (signal) return `ended by signal ${signal}`;
      return code === null || code === undefined ? "ended without an exit code" : `ended with exit code ${code}`;
    },
  };
  const LOG_KINDS = ["log", ...Object.keys(NOTES)].join(",");
  const asLine = ({ seq, at, kind, body }) => {
    const line = NOTES[kind] ? { stream: "supervisor", text: NOTES[kind](body) } : body;
    return { seq, t_ms: Date.parse(at), ...line };
  };

  const LINE_CHARACTERS = 2000; /* as of the lines that the server rendered */
  const shortened = (line) => {
    const characters = [...line]; /* a character may be two units of a string */
    return characters.length <= LINE_CHARACTERS ? line
      : `${characters.slice(0, LINE_CHARACTERS).join("")} … (a line of ${characters.length.toLocaleString("en-US")} characters)`;
  };

  /* A text that begins with a carriage return replaces the line that its stream left open. */
  const openRows = new Map([...(log?.querySelectorAll("[data-open]") ?? [])].map((row) => [row.dataset.open, row]));
  const write = (lines) => {
    if (!log) return;
    const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    for (const { seq, t_ms: t, stream, text } of lines) {
      if (seq <= lastSeq) continue;
      lastSeq = seq;
      const output = text.replace(/^\r/, "");
      if (output !== text) { openRows.get(stream)?.remove(); openRows.delete(stream); }
      for (const line of output ? output.replace(/\n$/, "").split("\n") : []) {
        const row = document.createElement("div");
        const time = document.createElement("span");
        time.className = "t";
        time.textContent = `${new Date(t).toLocaleTimeString("en-GB", { timeZone: log.dataset.zone || undefined })}  `;
        row.append(time, shortened(line));
        row.className = `line ${stream}`;
        log.append(row);
      }
      if (output && !output.endsWith("\n") && stream !== "supervisor") openRows.set(stream, log.lastElementChild);
    }
    while (log.childElementCount > 2000) log.firstElementChild.remove();
    if (log.querySelector(".line")) document.querySelector("[data-log-empty]")?.remove();
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  };

  const catchUp = async () => {
    try {
      if (log) {
        let before;
        do { /* an answer holds some events only */
          before = lastSeq;
          const answer = await fetch(`${job.dataset.eventsUrl}?${new URLSearchParams({ after: lastSeq, kind: LOG_KINDS, rank: job.dataset.host })}`);
          if (answer.ok) write((await answer.json()).events.map(asLine));
        } while (lastSeq > before);
      }
    } catch { /* the next poll tries again */ }
  };

  /* The end: figures, tables and time axes of the finished job, then silence. */
  const finish = async () => {
    if (isFinal) return;
    isFinal = true;
    for (const wait of [700, 4000, 15000]) {
      await new Promise((done) => { setTimeout(done, wait); });
      try {
        const fresh = await load(true);
        if (!fresh) continue;
        swap(fresh);
        charts?.adopt(fresh);
        take(fresh);
        await catchUp();
      } catch { /* tried again */ }
    }
    live.close();
  };

  document.addEventListener("live:frame", ({ detail: { event, data } }) => {
    const isShown = (data.host ?? 0) === Number(job.dataset.host); /* of several hosts one is shown */
    if (event === "job.metric") { if (isShown) refreshSoon(false); }
    else if (event === "job.log") { if (isShown) write(data.lines); }
    else refreshSoon(event === "job.state");
    if (event === "job.state" || data.phase) catchUp();
    if (event === "job.state" && FINAL.has(data.state)) finish();
  });
  document.addEventListener("live:resync", catchUp);
  document.addEventListener("live:poll", catchUp);
})();
