/* One stream per page, many topics on it. Reads server-sent events through fetch, because only
   then can a stream that this page closed itself be taken up again by Last-Event-ID, and the
   ticket be sent in a header.

   An element with data-live-ticket and data-live-topics asks for the stream, from the event that
   data-live-since names on. Listeners get DOM events on document: live:frame {topic, event, data},
   live:resync, live:poll, live:status. Events are best effort: a page that nothing has renewed for
   a while asks the server, even where its stream is open. */
(() => {
  "use strict";
  const holder = document.querySelector("[data-live-topics]");
  if (!holder) return;
  const POLL_MS = 5000;
  const QUIET_MS = 60000;
  const RETRY_MS = [500, 1000, 2000, 4000, 8000, 15000, 30000];
  const SILENCE_MS = 40000; // the server pings every 15 s
  const state = { lastId: holder.dataset.liveSince || "", errors: 0, heardAt: 0, frameAt: Date.now(), status: "connecting", stop: null, timer: 0, restMs: 0, closed: false };

  const say = (name, detail) => document.dispatchEvent(new CustomEvent(`live:${name}`, { detail }));
  const clock = (ms) => new Date(ms).toLocaleTimeString("en-GB");

  const setStatus = (status) => {
    if (state.status === status) return;
    state.status = status;
    document.documentElement.dataset.live = status;
    stamp();
    say("status", { status });
  };

  const stamp = () => {
    const age = Math.round((Date.now() - state.frameAt) / 1000);
    const words = {
      live: age < 60 ? `live · ${Math.max(1, age)} s` : "live",
      connecting: `connecting, as of ${clock(state.frameAt)}`,
      polling: `every 5 s, as of ${clock(state.frameAt)}`,
      stale: `as of ${clock(state.frameAt)}`,
      closed: "",
    };
    for (const element of document.querySelectorAll("[data-stamp]")) {
      element.textContent = words[state.status];
      element.classList.toggle("live", state.status === "live");
      element.classList.toggle("stale", state.status !== "live");
      element.hidden = state.status === "closed";
    }
  };

  const receive = ({ id, event, data }) => {
    state.heardAt = Date.now();
    if (id) state.lastId = id;
    if (event === "bye") return;
    if (event === "resync") { say("resync"); return; }
    if (event === "stale") { setStatus("stale"); return; }
    setStatus("live");
    if (!data) return;
    let body;
    try { body = JSON.parse(data); } catch { return; }
    say("frame", { event: event || "message", topic: body.t, data: body.d ?? body });
  };

  /* The text format of server-sent events: fields by line, a frame ends with an empty line. */
  const parser = () => {
    let rest = "";
    let frame = { id: "", event: "", data: "" };
    return (text) => {
      rest += text;
      const lines = rest.split("\n");
      rest = lines.pop();
      for (const raw of lines) {
        const line = raw.replace(/\r$/, "");
        if (line === "") {
          if (frame.event || frame.data) receive(frame);
          else state.heardAt = Date.now();
          frame = { id: "", event: "", data: "" };
        } else if (!line.startsWith(":")) {
          const [, field, value] = line.match(/^([^:]+):? ?(.*)$/) || [];
          if (field === "data") frame.data += (frame.data ? "\n" : "") + value;
          else if (field === "id" || field === "event") frame[field] = value;
        }
      }
    };
  };

  /* A ticket lives at most an hour; whoever is still signed in gets a fresh one. */
  const renewTicket = async () => {
    const answer = await fetch(`/api/v1/tickets?${new URLSearchParams({ topics: holder.dataset.liveTopics })}`);
    if (answer.status === 401 || answer.status === 403) location.reload(); // signed out: the log-in page says so
    else if (answer.ok) holder.dataset.liveTicket = (await answer.json()).ticket;
  };

  const connect = async () => {
    clearTimeout(state.timer);
    if (state.closed || document.hidden || state.stop) return;
    const control = new AbortController();
    state.stop = control;
    let watch = 0;
    try {
      const headers = { Accept: "text/event-stream", "Live-Ticket": holder.dataset.liveTicket };
      if (state.lastId) headers["Last-Event-ID"] = state.lastId;
      const answer = await fetch("/live/", { headers, signal: control.signal, cache: "no-store" });
      if (answer.status === 401 || answer.status === 403) { await renewTicket(); throw new Error("ticket"); }
      if (answer.status === 429) { // as many streams as there may be: poll, and come back later
        state.errors = Math.max(state.errors, 1);
        state.restMs = 1000 * Number(answer.headers.get("Retry-After") || 15);
        throw new Error("full");
      }
      if (!answer.ok || !answer.body) throw new Error(`status ${answer.status}`);
      state.errors = 0;
      state.heardAt = Date.now();
      setStatus("live");
      watch = setInterval(() => { if (Date.now() - state.heardAt > SILENCE_MS) control.abort(); }, 5000);
      const feed = parser();
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      for (;;) {
        const { done, value } = await reader.read();
        if (done) break;
        feed(value);
      }
      state.errors += 1; // the server ended it: a restart; come back soon
    } catch {
      state.errors += 1;
    }
    clearInterval(watch);
    if (state.stop !== control) return;
    state.stop = null;
    if (state.closed || document.hidden) return;
    setStatus(state.errors >= 2 ? "polling" : "connecting");
    const wait = Math.max(RETRY_MS[Math.min(state.errors - 1, RETRY_MS.length - 1)], state.restMs);
    state.restMs = 0;
    state.timer = setTimeout(connect, wait * (0.7 + Math.random() * 0.6));
  };

  const disconnect = () => {
    clearTimeout(state.timer);
    const control = state.stop;
    state.stop = null;
    if (control) control.abort();
  };

  document.addEventListener("visibilitychange", () => {
    if (document.hidden) disconnect();
    else if (!state.closed) { state.errors = 0; connect(); }
  });
  addEventListener("pagehide", disconnect);
  addEventListener("pageshow", (event) => { if (event.persisted) connect(); });

  setInterval(stamp, 1000);
  setInterval(() => {
    if (state.closed || document.hidden) return;
    if (state.status !== "live" || Date.now() - state.frameAt > QUIET_MS) say("poll");
  }, POLL_MS);

  window.slipway = window.slipway || {};
  window.slipway.live = {
    close: () => { state.closed = true; disconnect(); setStatus("closed"); },
    heard: () => { state.frameAt = Date.now(); stamp(); }, // the page shows what the server knows
    drop: () => { const control = state.stop; if (control) control.abort(); }, // for tests: cut the line
    state,
  };
  connect();
})();
