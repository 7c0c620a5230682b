"use strict";
// The report works without this script: it shows the first and the last evaluation side by side.
(() => {
  const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];
  const keep = (name, value) => {
    try {
      if (value === undefined) return localStorage.getItem(name);
      localStorage.setItem(name, value);
    } catch {} // a browser may refuse storage to local files
    return null;
  };

  // light, dark, or as the system says
  const themes = ["auto", "light", "dark"];
  const button = document.getElementById("theme");
  const setTheme = (theme) => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.textContent = `Colours: ${theme}`;
    button.value = theme;
    keep("diffusion-grpo-theme", theme);
  };
  const kept = keep("diffusion-grpo-theme");
  setTheme(themes.includes(kept) ? kept : "auto");
  button.addEventListener("click", () => setTheme(themes[(themes.indexOf(button.value) + 1) % themes.length]));

  // search
  const search = document.getElementById("search");
  const searched = all("[data-prompt]");
  const find = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const element of searched) {
      const prompt = element.dataset.prompt.toLowerCase();
      element.hidden = !words.every((word) => prompt.includes(word));
      count += element.hidden ? 0 : 1;
    }
    document.getElementById("found").textContent = words.length ? `${count} of ${searched.length} samples` : "";
  };
  search.addEventListener("input", find);
  search.hidden = searched.length === 0;
  for (const bar of all(".top, .tools")) bar.hidden = false;

  const gallery = document.querySelector(".gallery .cards");
  if (!gallery) return;
  const cards = all(".card", gallery);
  const side = (name) => document.querySelector(`select[data-side="${name}"]`);
  const format = (value) => (value === null ? "–" : value === 0 ? "0" : value.toFixed(2));

  // which two evaluations are shown
  const choose = () => {
    const [left, right] = ["left", "right"].map((name) => side(name).value);
    for (const card of cards) {
      const figures = all("figure", card);
      const shown = [left, right].map((step) => figures.find((figure) => figure.dataset.step === step));
      for (const figure of figures) {
        figure.hidden = !shown.includes(figure);
        figure.className = figure === shown[0] ? "left" : figure === shown[1] ? "right" : "";
        if (figure.hidden) for (const player of all("video, audio", figure)) player.pause();
      }
      const rewards = shown.map((figure) => (figure ? JSON.parse(figure.dataset.rewards) : []));
      all("tr", card).forEach((row, at) => {
        const [before, after] = rewards.map((values) => values[at] ?? null);
        const known = before !== null && after !== null;
        row.cells[1].textContent = format(before);
        row.cells[3].textContent = format(after);
        row.cells[3].className = known && after > before + 0.005 ? "up" : known && after < before - 0.005 ? "down" : "";
      });
    }
  };
  for (const name of ["left", "right"]) side(name).addEventListener("change", choose);

  // in which order
  document.getElementById("order").addEventListener("change", (event) => {
    const sign = { given: 0, better: -1, worse: 1 }[event.target.value];
    const sorted = sign ? [...cards].sort((a, b) => sign * (a.dataset.change - b.dataset.change)) : cards;
    gallery.append(...sorted);
  });

  // side by side, or one over the other with a divider
  const views = all("[data-view]");
  for (const view of views) {
    view.addEventListener("click", () => {
      for (const other of views) other.setAttribute("aria-pressed", String(other === view));
      const slides = view.dataset.view === "slide";
      gallery.classList.toggle("slide", slides);
      for (const video of all("video", gallery)) video.controls = !slides;
    });
  }
  for (const card of cards) {
    const pair = card.querySelector(".pair");
    const divider = card.querySelector(".divider");
    const move = (percent) => pair.style.setProperty("--at", `${percent}%`);
    divider.addEventListener("input", () => move(divider.value));
    let start = null;
    const drag = (event) => {
      const { left, width } = pair.getBoundingClientRect();
      divider.value = Math.max(0, Math.min(100, (100 * (event.clientX - left)) / width));
      move(divider.value);
    };
    pair.addEventListener("pointerdown", (event) => {
      if (!gallery.classList.contains("slide") || !event.target.closest(".frame")) return;
      start = event.clientX;
      pair.setPointerCapture(event.pointerId);
    });
    pair.addEventListener("pointermove", (event) => start !== null && drag(event));
    pair.addEventListener("pointerup", (event) => {
      const moved = start !== null && Math.abs(event.clientX - start) > 3;
      const clicked = start !== null && !moved;
      start = null;
      const video = clicked && card.querySelector("figure.right:not([hidden]) video, figure.left:not([hidden]) video");
      if (video) video.paused ? video.play() : video.pause();
    });
    pair.addEventListener("pointercancel", () => (start = null));
  }

  // the two videos of a prompt play together; one sound at a time
  const player = (event) => (event.target.matches("video, audio") ? event.target : null);
  const partners = (video) => all("figure:not([hidden]) video", video.closest(".pair")).filter((one) => one !== video);
  let leader = null;
  gallery.addEventListener(
    "play",
    (event) => {
      const started = player(event);
      if (started === null || (leader !== null && !leader.paused && partners(leader).includes(started))) return;
      leader = started;
      const together = started.tagName === "VIDEO" ? partners(started) : [];
      for (const other of all("video, audio", gallery)) {
        if (other !== started && !together.includes(other)) other.pause();
      }
      started.muted = false;
      for (const other of together) {
        other.muted = true;
        other.currentTime = started.currentTime;
        other.play();
      }
    },
    true,
  );
  gallery.addEventListener(
    "pause",
    (event) => {
      const stopped = player(event);
      if (stopped !== null && stopped.tagName === "VIDEO" && stopped === leader) {
        for (const other of partners(stopped)) other.pause();
      }
    },
    true,
  );
})();
