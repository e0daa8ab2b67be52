/* Draws the figures that webapp/charts builds: resolves design tokens, follows the theme, takes
   live points. A chart is drawn only while it is in view: with the page's other figures, else at
   most every two seconds. */
(() => {
  "use strict";
  const REDRAW_MS = 2000;
  const MAX_POINTS = 500;
  const CONFIG = { displayModeBar: false, responsive: true, displaylogo: false, scrollZoom: false, doubleClick: false };
  const FEWEST_SMOOTHED = 8;
  const HOUR_MS = 3_600_000, DAY_MS = 24 * HOUR_MS;
  const charts = new Map();
  let plotlyLoading = null;

  /* How times since the start are written on an axis that ends there: hours and days never begin
     anew at zero. The axis is of dates from midnight on a first of January, the run's first day. */
  const clockOf = (length) => {
    if (length < HOUR_MS) return { tickformat: "%-M:%S", hoverformat: "%-M:%S" };
    const day = length < DAY_MS ? "" : "day %-j, ";
    const stops = [[null, 60_000, `${day}%-H:%M:%S`], [60_000, DAY_MS, `${day}%-H:%M${day ? "" : " h"}`], [DAY_MS, null, "day %-j"]];
    return {
      tickformatstops: stops.map(([from, to, value]) => ({ dtickrange: [from, to], value })),
      hoverformat: `${day}%-H:%M:%S`,
    };
  };

  /* How all charts of a page are shown: over the step or time, losses by their logarithm, smoothed.
     The page that has the switches says so; others are over time as measured. */
  const tools = document.querySelector("[data-chart-tools]");
  const view = new Map([["axis", tools ? "step" : "time"], ["scale", "linear"], ["smooth", "0"]]);
  const steps = JSON.parse(document.getElementById("chart-steps")?.textContent ?? "[]").filter(([, step]) => step !== null);

  /* Whether there is an axis of steps; its switch is shown then. */
  const hasSteps = () => steps.length > 1;
  const offerAxis = () => { if (tools) tools.querySelector("[data-view='axis']").parentElement.hidden = !hasSteps(); };

  /* The step that was done at an instant in ms; null before the first one. */
  const stepAt = (t) => {
    let low = 0, high = steps.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (steps[middle][0] <= t) low = middle + 1; else high = middle;
    }
    return low ? steps[low - 1][1] : null;
  };

  /* An exponential mean whose first values are not drawn to zero. */
  const smoothed = (values, weight) => {
    let mean = 0, share = 0;
    return values.map((value) => {
      if (value === null || value === undefined) return null;
      mean = weight * mean + (1 - weight) * value;
      share = weight * share + 1 - weight;
      return mean / share;
    });
  };

  /* Keep some ends of a line's band, where it has one. */
  const narrow = (meta, isKept) => {
    if (!meta.low) return;
    meta.low = meta.low.filter(isKept);
    meta.high = meta.high.filter(isKept);
  };

  /* Put a line's points at these places; those without one are left out. */
  const place = (trace, places) => {
    const isPlaced = (_, i) => places[i] !== null;
    trace.y = trace.y.filter(isPlaced);
    narrow(trace.meta, isPlaced);
    trace.x = places.filter((at) => at !== null);
  };

  /* The band of several sources, from the lowest to the highest, lies around its line. */
  const surround = (data) => {
    const band = data.find((trace) => trace.meta?.edges);
    if (!band) return;
    const line = data.find((trace) => trace.meta?.metric);
    const { low, high } = line.meta;
    band.x = [...line.x, ...line.x.toReversed()];
    band.y = [...low, ...high.toReversed()];
    line.customdata = low.map((value, i) => [value, high[i]]);
  };

  /* Change a figure's copy to the chosen view. */
  const apply = ({ data, layout }, section) => {
    const measured = data.find((trace) => trace.meta?.metric);
    const { start_ms: start, origin_ms: origin } = layout.meta;
    const axis = start !== undefined && hasSteps() ? view.get("axis") : "time";
    if (axis === "training") { // time begins with the first step, whatever was measured before it
      const before = steps[0][0] - start;
      place(measured, measured.x.map((x) => (x - before >= origin ? x - before : null)));
      const end = Math.max(layout.xaxis.range[1] - before, origin + 1000);
      layout.xaxis = { ...layout.xaxis, range: [origin, end] };
      for (const trace of data) if (trace.meta?.spans === "x") trace.x = trace.x.map((x) => (x > origin ? end : origin));
    } else if (axis === "step") {
      const places = measured.x.map((x) => stepAt(start + x - origin));
      /* A resumed job repeats steps: the last is not always the highest. */
      const [begin, end] = steps.reduce(([low, high], [, step]) => [Math.min(low, step), Math.max(high, step)], [Infinity, -Infinity]);
      place(measured, places);
      for (const trace of data) if (trace.meta?.spans === "x") trace.x = trace.x.map((x) => (x > origin ? end : begin));
      layout.xaxis = { ...layout.xaxis, range: [begin, end], type: "linear", tickformatstops: [], tickformat: ",~r", hoverformat: ",~r" };
    }
    if (view.get("scale") === "log" && section === "Quality" && measured.y.every((y) => y === null || y > 0)) {
      layout.yaxis.type = "log";
      delete layout.yaxis.range;
    }
    if (Number(view.get("smooth")) && measured.y.length >= FEWEST_SMOOTHED) {
      data.splice(data.indexOf(measured), 0, { ...measured, opacity: 0.3, hoverinfo: "skip", hovertemplate: undefined, meta: {} });
      measured.y = smoothed(measured.y, Number(view.get("smooth")));
    }
    layout.xaxis.fixedrange = false;
    layout.dragmode = "zoom";
    layout.uirevision += [...view.values()].join();
  };

  /* One crosshair: where the pointer is in one chart, all others say their value. */
  let isEchoed = false;
  const echo = (source, act) => {
    if (isEchoed) return;
    isEchoed = true;
    for (const other of charts.values()) if (other !== source && other.isDrawn && other.isVisible) act(other.plot);
    isEchoed = false;
  };

  /* Colours: tokens are light-dark() and oklch(), Plotly wants rgba. */
  const probe = document.createElement("i");
  probe.hidden = true;
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 1;
  const pen = canvas.getContext("2d", { willReadFrequently: true });

  const colours = new Map(); /* of the present theme: each is a computed style and a drawn pixel */
  const colour = (token) => {
    if (!colours.has(token)) colours.set(token, computedColour(token));
    return colours.get(token);
  };

  const computedColour = (token) => {
    if (!probe.isConnected) document.body.append(probe);
    probe.style.color = token;
    pen.clearRect(0, 0, 1, 1);
    pen.fillStyle = getComputedStyle(probe).color;
    pen.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = pen.getImageData(0, 0, 1, 1).data;
    return `rgba(${r},${g},${b},${(a / 255).toFixed(3)})`;
  };

  const resolve = (value) => {
    if (typeof value === "string") return value.startsWith("var(--") ? colour(value) : value;
    if (Array.isArray(value)) return typeof value[0] === "number" ? value.slice() : value.map(resolve);
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, resolve(inner)]));
    }
    return value;
  };

  const loadPlotly = (source) => {
    plotlyLoading ??= new Promise((done, failed) => {
      const script = document.createElement("script");
      script.src = source;
      script.onload = () => done(window.Plotly);
      script.onerror = failed;
      document.head.append(script);
    });
    return plotlyLoading;
  };

  const plotly = (element) => loadPlotly(document.body.dataset.plotly || element.dataset.plotly);
  const known = (trace) => trace.y.filter((value) => value !== null);

  /* Saving a chart: its picture as it is shown, or what was drawn as a table. */
  const PICTURE = { width: 960, height: 420 };
  const FORMATS = { png: "PNG picture", svg: "SVG drawing", csv: "CSV table" };

  const give = (blob, name) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  };

  const axisTitle = ({ element }) => {
    const names = { step: "Step", training: "Time since first step" };
    return element.dataset.x ?? ((hasSteps() && names[view.get("axis")]) || "Time since start");
  };

  const drawingOf = async (chart) => {
    const { data, layout } = chart.shown();
    const title = { text: chart.title, x: 0.02, font: { color: colour("var(--ink)"), size: 15 } };
    const named = (axis, text) => ({ ...axis, title: { text }, automargin: true });
    const xaxis = named(layout.xaxis, axisTitle(chart));
    const yaxis = named(layout.yaxis, chart.element.dataset.unit ?? "");
    const page = { ...layout, ...PICTURE, xaxis, yaxis, title, paper_bgcolor: colour("var(--surface)"), margin: { l: 64, r: 24, t: 44, b: 48 } };
    const Plotly = await plotly(chart.element);
    return Plotly.toImage({ data, layout: page, config: CONFIG }, { format: "svg", ...PICTURE });
  };

  /* The policy of the page lets no picture come from a blob: the drawing is one in its address. */
  const rastered = (address) => new Promise((done, failed) => {
    const picture = new Image();
    picture.onload = () => {
      const sheet = document.createElement("canvas");
      [sheet.width, sheet.height] = [2 * PICTURE.width, 2 * PICTURE.height];
      sheet.getContext("2d").drawImage(picture, 0, 0, sheet.width, sheet.height);
      sheet.toBlob(done, "image/png");
    };
    picture.onerror = failed;
    picture.src = address;
  });

  /* One row for each point of each line: what is measured, and the ends of what is predicted. */
  const tableOf = (chart) => {
    const { figure: { data, layout }, element } = chart;
    const { start_ms: start, origin_ms: origin } = layout.meta;
    const isTimed = origin !== undefined;
    const interval = data.find((trace) => trace.name === "80 % interval");
    const unit = element.dataset.unit ? ` (${element.dataset.unit})` : "";
    const rows = [["line", isTimed ? "seconds" : axisTitle(chart).toLowerCase(), ...(isTimed ? ["step"] : []), `value${unit}`, `low${unit}`, `high${unit}`]];
    for (const trace of data) {
      if (trace === interval || trace.meta?.edges || trace.fill) continue;
      const ends = (i) => {
        if (trace.meta?.low) return [trace.meta.low[i], trace.meta.high[i]];
        if (trace.name === "predicted" && interval) return [interval.y[i], interval.y.at(-1 - i)];
        return ["", ""];
      };
      trace.x.forEach((x, i) => {
        if (trace.y[i] === null) return;
        const places = isTimed ? [(x - origin) / 1000, trace.meta?.metric && steps.length ? stepAt(start + x - origin) ?? "" : ""] : [x];
        rows.push([trace.name, ...places, trace.y[i], ...ends(i)]);
      });
    }
    const quoted = (cell) => (/[",\n]/.test(cell) ? `"${String(cell).replaceAll('"', '""')}"` : cell);
    return rows.map((row) => row.map(quoted).join(",")).join("\n") + "\n";
  };

  const save = async (chart, format) => {
    const slug = (text) => text.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "");
    const name = `${slug(document.querySelector("h1")?.textContent ?? "chart")}-${slug(chart.element.dataset.chart)}.${format}`;
    if (format === "csv") return give(new Blob([tableOf(chart)], { type: "text/csv" }), name);
    const address = await drawingOf(chart);
    if (format === "png") return give(await rastered(address), name);
    return give(new Blob([decodeURIComponent(address.slice(address.indexOf(",") + 1))], { type: "image/svg+xml" }), name);
  };

  /* The menu of a chart's head; its entries are made as it is opened. */
  const offerSaving = (chart) => {
    const head = chart.element.querySelector("header");
    if (!head) return;
    const menu = document.createElement("details");
    menu.className = "menu save";
    const word = document.createElement("summary");
    word.textContent = "Save";
    word.setAttribute("aria-label", `Save the chart ${chart.title}`);
    menu.append(word);
    menu.addEventListener("toggle", () => {
      if (!menu.open || menu.children.length > 1) return;
      const sheet = document.createElement("div");
      sheet.className = "sheet";
      for (const [format, label] of Object.entries(FORMATS)) {
        const button = document.createElement("button");
        button.type = "button";
        button.className = "item";
        button.textContent = label;
        button.addEventListener("click", () => { menu.open = false; word.focus(); save(chart, format); });
        sheet.append(button);
      }
      menu.append(sheet);
    });
    head.append(menu);
  };

  class Chart {
    constructor(element) {
      this.element = element;
      this.title = element.querySelector("h3")?.textContent ?? "";
      this.plot = element.querySelector("[data-plot]");
      this.figure = JSON.parse(element.querySelector("script[type='application/json']").textContent);
      this.isVisible = false;
      this.isDirty = true;
      this.drawnAt = 0;
    }

    get measured() {
      return this.figure.data.find((trace) => trace.meta && trace.meta.metric);
    }

    /* Points are [t_ms, value] in base units, in order; what is already drawn is passed over. */
    append(points) {
      const trace = this.measured;
      const { start_ms: start, origin_ms: origin } = this.figure.layout.meta;
      let last = trace.x.length ? trace.x[trace.x.length - 1] : -Infinity;
      for (const [t, value, low, high] of points) { // the last two where several sources have a band
        const x = origin + t - start;
        if (x <= last) continue;
        trace.x.push(x);
        trace.y.push(value * trace.meta.scale);
        if (low !== undefined) {
          trace.meta.low.push(low * trace.meta.scale);
          trace.meta.high.push(high * trace.meta.scale);
        }
        last = x;
        this.isDirty = true;
      }
      if (trace.x.length > MAX_POINTS) this.thin(trace);
      this.fit(last);
    }

    /* Halve the older part; the newest hundred points stay as they came. */
    thin(trace) {
      const keep = (_, i) => i >= trace.x.length - 100 || i % 2 === 0;
      const y = trace.y.filter(keep);
      narrow(trace.meta, keep);
      trace.x = trace.x.filter(keep);
      trace.y = y;
    }

    fit(last) {
      const { xaxis, yaxis, meta } = this.figure.layout;
      if (last > xaxis.range[1]) this.reach(last + 0.1 * (last - meta.origin_ms));
      if (meta.from_zero) {
        const top = Math.max(...this.figure.data.flatMap((trace) => trace.meta?.high ?? trace.y)); // null counts as 0
        if (top > 0) yaxis.range = [0, top * 1.08];
      }
    }

    /* Let the time axis, and what is predicted along it, end there. */
    reach(end) {
      const origin = this.figure.layout.meta.origin_ms;
      this.figure.layout.xaxis.range = [origin, end];
      for (const trace of this.figure.data) {
        if (trace.meta && trace.meta.spans === "x") trace.x = trace.x.map((x) => (x > origin ? end : origin));
      }
      this.isDirty = true;
    }

    /* Without a second point and a prediction there is nothing that axes could be of. */
    get isAwaited() {
      if (this.figure.layout.meta.start_ms === undefined || known(this.measured).length > 1) return false;
      return this.plot.classList.contains("awaited") || !this.figure.data.some((trace) => trace !== this.measured && trace.x.length);
    }

    /* The only value of a line that has just begun. */
    showSingle() {
      const [value] = known(this.measured);
      if (value === undefined || this.plot.querySelector("strong")) return;
      const said = document.createElement("span");
      const figure = document.createElement("strong");
      figure.className = "num";
      figure.textContent = `${value.toLocaleString("en-US", { maximumSignificantDigits: 4 })} ${this.element.dataset.unit ?? ""}`.trim();
      said.append(figure, " one value so far");
      this.plot.replaceChildren(said);
    }

    /* A copy of the figure in the page's theme and view, as Plotly takes it. */
    shown() {
      const { data, layout } = resolve(this.figure);
      const { type, range } = layout.xaxis;
      if (type === "date") layout.xaxis = { ...layout.xaxis, ...clockOf(range[1] - layout.meta.origin_ms) };
      if (tools) apply({ data, layout }, this.element.dataset.section);
      surround(data);
      for (const trace of data) if (trace.meta?.metric && trace.x.length === 1) trace.mode = "markers";
      layout.xaxis.showticklabels = this.measured.x.length > 0; // before it, time has not begun
      return { data, layout };
    }

    async draw() {
      this.isDirty = false;
      this.drawnAt = performance.now();
      if (this.isAwaited) return this.showSingle();
      this.plot.classList.remove("awaited");
      const Plotly = await plotly(this.element);
      const { data, layout } = this.shown();
      if (!this.isDrawn) this.plot.replaceChildren();
      this.element.dataset.drawn = String(this.measured.x.length); // from here on CSS sets the height
      layout.height = this.plot.clientHeight;
      layout.autosize = true;
      await Plotly.react(this.plot, data, layout, tools ? { ...CONFIG, doubleClick: "reset" } : CONFIG);
      if (tools && !this.isDrawn) {
        this.plot.on("plotly_hover", ({ xvals }) => echo(this, (plot) => Plotly.Fx.hover(plot, { xval: xvals[0] })));
        this.plot.on("plotly_unhover", () => echo(this, (plot) => Plotly.Fx.unhover(plot)));
      }
      this.isDrawn = true;
    }
  }

  /* One chart is drawn in a frame: keys and clicks are answered, and shown, before the next one. */
  const painted = () => new Promise((done) => {
    requestAnimationFrame(() => setTimeout(done));
    setTimeout(done, 100); // a page in the background has no frames
  });
  const waiting = new Set();
  let isDrawing = false;
  const drawSoon = async (chart) => {
    if (!chart.isVisible || !chart.isDirty) return;
    waiting.add(chart);
    if (isDrawing) return;
    isDrawing = true;
    try {
      for (const next of waiting) { // also those that are added meanwhile
        await painted();
        waiting.delete(next);
        while (document.querySelector("dialog[open]")) await new Promise((done) => { setTimeout(done, 500); }); // they are behind it
        if (next.isVisible && next.isDirty) await next.draw();
      }
    } finally { isDrawing = false; }
  };

  const tick = () => {
    const now = performance.now();
    for (const chart of charts.values()) if (now - chart.drawnAt >= REDRAW_MS) drawSoon(chart);
  };

  const redrawAll = () => charts.forEach((chart) => { chart.isDirty = true; drawSoon(chart); });

  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const chart = charts.get(entry.target);
      if (!chart) continue;
      chart.isVisible = entry.isIntersecting;
      drawSoon(chart);
    }
  }, { rootMargin: "80px" });

  const mount = () => {
    for (const [element] of charts) {
      if (!element.isConnected) { observer.unobserve(element); charts.delete(element); }
    }
    for (const element of document.querySelectorAll("[data-chart]")) {
      if (charts.has(element)) continue;
      charts.set(element, new Chart(element));
      offerSaving(charts.get(element));
      observer.observe(element);
    }
  };

  /* Take the figures of a freshly fetched page: the finished job's axes and points. */
  const adopt = (fresh) => charts.forEach((chart, element) => {
    const script = fresh.querySelector(`[data-chart="${element.dataset.chart}"] script[type="application/json"]`);
    if (!script) return;
    chart.figure = JSON.parse(script.textContent);
    chart.isDirty = true;
  });

  const each = (metric, act) => charts.forEach((chart) => {
    if (chart.measured.meta.metric === metric) act(chart);
  });

  /* Charts over time; those over something else stay as they came. */
  const timed = () => [...charts.values()].filter((chart) => chart.figure.layout.meta.start_ms !== undefined);

  /* The first point of all says where time begins. */
  const append = (metric, points) => {
    if (metric === "step") {
      steps.push(...points.filter(([t]) => t > (steps.at(-1)?.[0] ?? -Infinity)));
      offerAxis();
      return;
    }
    if (points.length && !timed().some((chart) => chart.measured.x.length)) {
      timed().forEach((chart) => { chart.figure.layout.meta.start_ms = points[0][0]; });
    }
    each(metric, (chart) => chart.append(points));
  };

  /* Where the axes end: what the job itself expects; small changes of mind are passed over. */
  const expect = (length) => timed().forEach((chart) => {
    const { meta, xaxis } = chart.figure.layout;
    const before = xaxis.range[1] - meta.origin_ms;
    const last = (chart.measured.x.at(-1) ?? meta.origin_ms) - meta.origin_ms;
    if (length > last && Math.abs(length - before) > 0.05 * before) chart.reach(meta.origin_ms + length);
  });

  window.slipway = window.slipway || {};
  /* Draw what an answer brought beside the rest of it; the instant is the server's. */
  const show = (asOf) => charts.forEach((chart, element) => {
    element.dataset.asOf = asOf;
    drawSoon(chart);
  });

  window.slipway.charts = {
    mount,
    show,
    append,
    expect,
    lastInstant: () => Math.max(0, ...timed().map((chart) => {
      const { x } = chart.measured;
      const { start_ms: start, origin_ms: origin } = chart.figure.layout.meta;
      return x.length ? start + x[x.length - 1] - origin : 0;
    })),
    adopt,
    has: () => charts.size > 0,
  };

  const changeTheme = () => { colours.clear(); redrawAll(); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changeTheme);
  new MutationObserver(changeTheme).observe(document.documentElement, { attributeFilter: ["data-theme"] });
  const press = () => {
    for (const button of tools.querySelectorAll("[data-view]")) {
      button.setAttribute("aria-pressed", String(view.get(button.dataset.view) === button.value));
    }
  };
  if (tools) {
    tools.hidden = false;
    offerAxis();
    press();
    tools.addEventListener("click", ({ target }) => {
      if (!target.matches("[data-view]")) return;
      view.set(target.dataset.view, target.value);
      press();
      redrawAll();
    });
  }
  setInterval(tick, 500);
  mount();
})();
