/* The playground: the answer appears as it is written. Without this file the form is a plain POST. */
(() => {
  "use strict";
  const form = document.querySelector("[data-playground]");
  if (!form) return;
  const place = document.querySelector("[data-playground-answer]");
  const text = place.querySelector("pre");
  const ask = form.querySelector("button.primary");
  const stop = form.querySelector("[data-playground-stop]");
  let current = null;

  const read = async (answer) => {
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
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
    stop.hidden = true;
    ask.disabled = false;
    text.removeAttribute("aria-busy");
  });
  stop.addEventListener("click", () => current?.abort());
})();
