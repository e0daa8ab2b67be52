/* The playground: the answer appears as it is written. Without this file the form is a plain POST. */
(() => {
  "use strict";
  const form = document.querySelector("[data-playground]");
  if (!form) return;
  const place = document.querySelector("[data-playground-answer]");
  const text = place.querySelector("pre");
  const ask = form.querySelector("button.primary");
  const words = place.querySelector("[data-playground-words]");
  const stop = form.querySelector("[data-playground-stop]");
  let current = null;
  let askedAt = 0;

  const seconds = () => `${((performance.now() - askedAt) / 1000).toFixed(1)} s`;
  const read = async (answer) => {
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      if (value && !text.textContent && answer.ok) words.textContent = `first text after ${seconds()}`;
      text.append(value);
      text.scrollTop = text.scrollHeight;
    }
  };

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    current?.abort();
    current = new AbortController();
    const { signal } = current;
    text.textContent = "";
    askedAt = performance.now();
    words.textContent = "waiting for the first text";
    place.hidden = false;
    stop.hidden = false;
    ask.disabled = true;
    text.setAttribute("aria-busy", "true");
    try {
      const answer = await fetch(form.action, {
        method: "POST", body: new FormData(form), headers: { Accept: "text/event-stream" }, signal,
      });
      await read(answer);
      if (!text.textContent) text.textContent = "The answer is empty: the first token ended it.";
    } catch {
      if (!signal.aborted) text.append("\nThe connection to this site was lost. Ask again.");
    }
    if (!words.textContent.startsWith("first")) words.textContent = "";
    stop.hidden = true;
    ask.disabled = false;
    text.removeAttribute("aria-busy");
  });
  stop.addEventListener("click", () => current?.abort());
})();
