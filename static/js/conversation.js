/* A conversation with a deployment, through the gateway, as any client has it. A model without a
   chat template has texts continued instead, each by itself. */
(() => {
  "use strict";
  const form = document.querySelector("[data-conversation]");
  if (!form) return;
  const turns = document.querySelector("[data-turns]");
  const field = (name) => form.elements.namedItem(name);
  const button = (name) => form.querySelector(`[data-${name}]`);
  const stop = button("stop");
  const { gateway } = form.dataset;
  const FOLLOW_MS = 2000;
  let messages = []; // of the conversation, without the system prompt
  let key = "";
  let current = null;
  let text = ""; // the last one that was continued
  const continues = () => form.dataset.chatTemplate === "no";
  const path = () => (continues() ? "completions" : "chat/completions");

  /* What is sent, with the message that is being written, if any. */
  const request = (written = "") => {
    const system = field("system").value.trim();
    const said = [...(system ? [{ role: "system", content: system }] : []), ...messages];
    if (written) said.push({ role: "user", content: written });
    return {
      model: field("model").value,
      ...(continues() ? { prompt: written || text } : { messages: said }),
      temperature: Number(field("temperature").value),
      max_tokens: Number(field("max_tokens").value),
    };
  };

  /* The conversation as code, with the message that is being written. */
  const showCode = () => {
    const body = request(field("prompt").value.trim());
    const [call, read] = continues() ? ["completions", "text"] : ["chat.completions", "message.content"];
    const json = JSON.stringify(body, null, 2);
    document.querySelector("#conversation-curl").textContent = [
      `curl ${form.dataset.url}/${path()} \\`,
      '  -H "Content-Type: application/json" -H "Authorization: Bearer $SLIPWAY_KEY" \\',
      `  -d '${json.replaceAll("'", "'\\''")}'`,
    ].join("\n");
    const named = Object.entries(body).map(([name, value]) => `    ${name}=${JSON.stringify(value)},`);
    document.querySelector("#conversation-python").textContent = [
      "import os", "", "from openai import OpenAI", "",
      `client = OpenAI(base_url=${JSON.stringify(form.dataset.url)}, api_key=os.environ["SLIPWAY_KEY"])`,
      `answer = client.${call}.create(`, ...named, ")",
      `print(answer.choices[0].${read})`,
    ].join("\n");
  };

  const turn = (who, text) => {
    const item = document.createElement("li");
    const head = document.createElement("p");
    const name = document.createElement("strong");
    const words = document.createElement("span");
    const body = document.createElement("pre");
    item.className = "stack-s";
    head.className = "faint";
    body.className = "log wrapped";
    body.tabIndex = 0;
    body.setAttribute("aria-label", who);
    name.textContent = who;
    words.setAttribute("role", "status");
    body.textContent = text;
    head.append(name, " ", words);
    item.append(head, body);
    turns.append(item);
    return { item, body, words, isHeld: false };
  };

  const fetchKey = async () => {
    const sent = new FormData();
    sent.set("csrfmiddlewaretoken", field("csrfmiddlewaretoken").value);
    const answer = await fetch(form.dataset.keyUrl, { method: "POST", body: sent });
    if (!answer.ok) throw new Error("This site gave no key. Load the page again.");
    return answer.text();
  };

  const ask = async (body, signal) => {
    key ||= await fetchKey();
    const answer = await fetch(`${gateway}/${path()}`, {
      method: "POST", signal, body: JSON.stringify(body),
      headers: { Authorization: `Bearer ${key}`, "Content-Type": "application/json" },
    });
    if (answer.status === 401) key = "";
    return answer;
  };

  const messageOf = (text) => {
    try {
      return JSON.parse(text).error.message;
    } catch {
      return text.slice(0, 500) || "The gateway does not answer.";
    }
  };

  /* Yield the documents of an event stream; comments, which keep it open, are left out. */
  const events = async function* events(answer) {
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data: {")) yield JSON.parse(line.slice("data: ".length));
      }
    }
  };

  const read = async (answer, shown, askedAt) => {
    let firstAt = 0;
    let tokens = 0;
    for await (const event of events(answer)) {
      if (event.error) throw new Error(event.error.message);
      const choice = event.choices?.[0] ?? {};
      const delta = choice.delta ?? {};
      const part = `${delta.reasoning_content ?? ""}${delta.content ?? ""}${choice.text ?? ""}`;
      if (part) {
        firstAt ||= performance.now();
        shown.isHeld = false;
      }
      tokens = event.usage?.completion_tokens ?? tokens;
      shown.body.append(part);
      if (part) shown.item.scrollIntoView({ block: "nearest" });
    }
    shown.isHeld = false;
    const now = performance.now();
    const rate = ((tokens - 1) / (now - firstAt)) * 1000;
    const figures = firstAt
      ? [`first token after ${((firstAt - askedAt) / 1000).toFixed(2)} s`]
      : ["the answer has no text: its first token ended it"];
    if (firstAt && tokens > 1) figures.push(`${rate.toFixed(1)} tok/s`);
    if (tokens) figures.push(`${tokens} tokens`);
    shown.words.textContent = figures.join(" · ");
  };

  /* What the gateway knows of the deployment. */
  const card = () => fetch(`${gateway}/models/${form.dataset.name}`, { headers: { Authorization: `Bearer ${key}` } })
    .then((answer) => answer.json())
    .catch(() => ({}));

  /* While a request is held, say how far the model is. */
  const follow = async (shown) => {
    const { state, seconds_to_go: seconds } = key ? await card() : {};
    if (!shown.isHeld) return;
    if (state === "ready") shown.words.textContent = "waiting for the first token";
    else if (state === "silent") shown.words.textContent = "the model does not answer; your request is held";
    else if (state === "loading" && seconds) shown.words.textContent = `the model is loaded first, in about ${Math.ceil(seconds)} s`;
  };

  /* Once it was loaded, it is known whether a model has a chat template. */
  const learn = async () => {
    if (form.dataset.chatTemplate || !key) return;
    const { has_chat_template: hasTemplate } = await card();
    if (hasTemplate === undefined) return;
    form.dataset.chatTemplate = hasTemplate ? "yes" : "no";
    showKind();
  };

  const showKind = () => {
    document.querySelector("[data-continues]").hidden = !continues();
    field("system").closest(".field").hidden = continues();
  };

  const send = async () => {
    const prompt = field("prompt").value.trim();
    if (!prompt || current) return;
    current = new AbortController();
    const { signal } = current;
    const body = { ...request(prompt), stream: true, stream_options: { include_usage: true } };
    if (continues()) text = prompt;
    else messages.push({ role: "user", content: prompt });
    const asked = turn("You", prompt);
    field("prompt").value = "";
    const shown = turn(field("model").value, "");
    shown.words.textContent = "waiting for the first token; a model that sleeps is loaded first";
    shown.isHeld = true;
    const following = setInterval(() => follow(shown), FOLLOW_MS);
    stop.hidden = false;
    button("send").disabled = true;
    shown.body.setAttribute("aria-busy", "true");
    const askedAt = performance.now();
    try {
      const answer = await ask(body, signal);
      if (!answer.ok) throw new Error(messageOf(await answer.text()));
      await read(answer, shown, askedAt);
    } catch (error) {
      shown.isHeld = false;
      if (signal.aborted) {
        shown.words.textContent = "stopped";
      } else if (shown.body.textContent) {
        shown.words.textContent = `broken off: ${error.message}`;
      } else { // nothing was answered: the message can be sent again
        shown.words.textContent = error.message;
        field("prompt").value = prompt;
        asked.item.remove();
      }
    }
    clearInterval(following);
    if (messages.at(-1)?.role === "user") { // what was not answered is not part of it
      if (shown.body.textContent) messages.push({ role: "assistant", content: shown.body.textContent });
      else messages.pop();
    }
    await learn();
    current = null;
    stop.hidden = true;
    button("send").disabled = false;
    shown.body.removeAttribute("aria-busy");
    showCode();
    field("prompt").focus();
  };

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      if (form.reportValidity()) send();
    }
  });
  form.addEventListener("input", showCode);
  stop.addEventListener("click", () => current?.abort());
  button("new").addEventListener("click", () => {
    current?.abort();
    messages = [];
    text = "";
    turns.replaceChildren();
    showCode();
    field("prompt").focus();
  });
  showKind();
  showCode();
})();
