// @ts-check
// The stream of events of an open page. Each event replaces texts in place, so that nothing jumps.

import { keepFromPage, leaveToPage, noteEvent, noteLost, readSoon } from "./reread.js";

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenth = new Intl.NumberFormat("en", { maximumFractionDigits: 1, minimumFractionDigits: 1 });

/** @param {number | null | undefined} value */
export function number(value) {
  if (value === null || value === undefined) return "–";
  return value >= 10 || Number.isInteger(value) ? whole.format(value) : tenth.format(value);
}

/** Returns a length of time in its two largest units, as the server writes it.
 * @param {number | null | undefined} seconds */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${(Math.max(0, seconds) * 1000).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  let left = Math.round(seconds);
  const parts = [];
  for (const [unit, size] of /** @type {[string, number][]} */ ([["d", 86400], ["h", 3600], ["min", 60], ["s", 1]])) {
    if (left >= size || (unit === "s" && !parts.length)) {
      parts.push(`${Math.floor(left / size)} ${unit}`);
      left %= size;
    } else if (parts.length) break;
  }
  return parts.slice(0, 2).join(" ");
}

/** @param {number | null | undefined} share From 0 to 1. */
const percent = (share) => (share === null || share === undefined ? "–" : `${(100 * share).toFixed(1)} %`);

/** @param {Element | null} element @param {string} text */
function put(element, text) {
  if (!element) return;
  keepFromPage(element);
  if (element.textContent !== text) element.textContent = text;
}

/** @param {ParentNode} root @param {string} name @param {string} text */
const putFields = (root, name, text) => root.querySelectorAll(`[data-f="${name}"]`).forEach((e) => put(e, text));

/** Returns whether the page shows other workers, or other states of them.
 * @param {any} state */
function hasOtherWorkers(state) {
  const tile = document.querySelector('[data-f="workers"]');
  if (tile && tile.textContent !== number(state.workers)) return true;
  return state.each.some((/** @type {any} */ worker) => {
    const shown = document.querySelector(`[data-worker="${CSS.escape(worker.id)}"] .status`);
    return shown && !shown.classList.contains(`status-${worker.state}`);
  });
}

/** @param {any} state */
function showFleet(state) {
  if (hasOtherWorkers(state)) { // tiles, table and what stalls change together
    document.querySelectorAll('[data-f="slots"], [data-w="fill"], [data-w="bar"]').forEach(leaveToPage);
    readSoon();
    return;
  }
  if (state.out_s !== null) { // null in the first seconds: the page keeps the rates of the last minute
    putFields(document, "out_s", number(state.out_s));
    putFields(document, "in_s", number(state.in_s));
    putFields(document, "requests_s", number(state.requests_s));
    putFields(document, "cached", percent(state.cached));
    for (const note of document.querySelectorAll('[data-f="rates_over"]')) put(note, /** @type {HTMLElement} */ (note).dataset.live ?? "");
  }
  putFields(document, "slots", `${number(state.running)} / ${number(state.slots)}`);
  putFields(document, "waiting", number(state.waiting));
  for (const worker of state.each) {
    for (const place of document.querySelectorAll(`[data-worker="${CSS.escape(worker.id)}"]`)) {
      put(place.querySelector('[data-w="model"]'), worker.model);
      put(place.querySelector('[data-w="fill"]'), `${number(worker.running)} / ${number(worker.slots)}`);
      if (worker.out_s !== null) put(place.querySelector('[data-w="out_s"]'), number(worker.out_s));
      place.querySelector('[data-w="bar"]')?.setAttribute("width", String(worker.slots ? Math.round((1000 * worker.running) / worker.slots) : 0));
    }
  }
}

/** @param {any} row */
function showBatch(row) {
  const name = CSS.escape(row.id);
  for (const place of document.querySelectorAll(`[data-batch="${name}"]`)) {
    const all = /** @param {string} key */ (key) => [...place.querySelectorAll(`[data-b="${key}"]`)];
    const putAll = /** @param {string} key @param {string} text */ (key, text) => all(key).forEach((e) => put(e, text));
    putAll("done", number(row.done));
    putAll("total", number(row.total) + (row.grows ? "+" : ""));
    putAll("failed", number(row.failed));
    if (row.rate !== null) { // null in the first seconds: the page keeps the mean
      putAll("rate", number(row.rate));
      for (const note of document.querySelectorAll('[data-b="rates_over"]')) put(note, /** @type {HTMLElement} */ (note).dataset.live ?? "");
    } else if (row.ended) all("rate").forEach(leaveToPage); // a retried batch has none
    // Why nothing runs now is on the page.
    if (!row.ended && row.left_s === null && all("left").some((e) => e.textContent !== "–")) readSoon();
    putAll("left", row.ended ? duration(row.seconds) : duration(row.left_s));
    putAll("tokens_in", number(row.tokens_in));
    putAll("tokens_out", number(row.tokens_out));
    putAll("cached_share", percent(row.cached_share));
    const shown = place.querySelector('[data-b="status"] .status');
    if (shown && !shown.classList.contains(`status-${row.tone || row.status}`)) readSoon();
  }
  for (const bar of document.querySelectorAll(`[data-bar="${name}"]`)) {
    const done = row.total ? Math.round((1000 * row.completed) / row.total) : 0;
    const bad = row.total ? Math.ceil((1000 * row.failed) / row.total) : 0;
    bar.querySelector(".bar-done")?.setAttribute("width", String(done));
    bar.querySelector(".bar-failed")?.setAttribute("x", String(done));
    bar.querySelector(".bar-failed")?.setAttribute("width", String(bad));
    bar.setAttribute("aria-label", row.total ? `${((100 * row.done) / row.total).toFixed(1)} %` : "–");
  }
}

/** @param {any} state */
function showText(state) {
  const place = document.getElementById("live-text");
  if (place) put(place, state.text);
  if (state.ended) setTimeout(() => location.reload(), 300);
}

/** @param {string} address */
export function live(address) {
  const pulse = document.getElementById("pulse");
  const show = /** @param {boolean} on */ (on) => {
    if (!pulse) return;
    pulse.className = `pulse ${on ? "on" : "off"}`;
    put(pulse, (on ? pulse.dataset.live : pulse.dataset.lost) ?? "");
  };
  /** @type {EventSource | null} */
  let source = null;
  const open = () => {
    source = new EventSource(address);
    source.addEventListener("open", () => show(true));
    for (const name of ["error", "lost"]) source.addEventListener(name, () => { show(false); noteLost(); });
    source.addEventListener("out", () => location.assign("/ui/login"));
    const events = /** @type {[string, (state: any) => void][]} */ ([["fleet", showFleet], ["batch", showBatch], ["text", showText]]);
    for (const [name, act] of events) {
      source.addEventListener(name, (event) => { show(true); noteEvent(); act(JSON.parse(event.data)); });
    }
  };
  // A hidden page has no stream: it opens one again when it is shown.
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) { source?.close(); source = null; } else if (!source) open();
  });
  if (!document.hidden) open();
}
