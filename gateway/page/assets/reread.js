// @ts-check
// Times in the viewer's zone, and an open page that is read again.

// Times keep the server's format in every language, so that no width changes.
const long = new Intl.DateTimeFormat("sv-SE", { dateStyle: "short", timeStyle: "medium" });
const short = new Intl.DateTimeFormat(document.documentElement.lang, { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });

/** @param {ParentNode} root */
export function localTimes(root) {
  for (const time of /** @type {NodeListOf<HTMLTimeElement>} */ (root.querySelectorAll("time[datetime]"))) {
    time.title = `${time.dateTime} (UTC)`;
    time.textContent = ("short" in time.dataset ? short : long).format(new Date(time.dateTime));
  }
}

/** Milliseconds between two readings: after an event, on a page that is costly to make, without an event. */
const AFTER_MS = 5_000, COSTLY_MS = 30_000, IDLE_MS = 10_000;
let readAt = Date.now();
let changed = false;

/** Elements that the stream writes. They are newer than the page, and may be means of other times. */
let streamed = new WeakSet();

/** @param {Element} element */
export const keepFromPage = (element) => { streamed.add(element); };

/** @param {Element} element */
export const leaveToPage = (element) => { streamed.delete(element); };

/** @param {Element} element The data attributes name a value. */
const valueOf = (element) => JSON.stringify({ ...(/** @type {HTMLElement} */ (element).dataset) });

/** Returns whether the page may change an element. Without an id, an element may become that of another value.
 * @param {Element} old @param {Element} fresh */
function isPages(old, fresh) {
  if (old.matches?.('form[method="get"]')) return false;
  if (streamed.has(old) && valueOf(old) === valueOf(fresh)) return false;
  leaveToPage(old);
  return true;
}

/** Reads the page within a second, because it has other parts now. */
export const readSoon = () => { readAt = 0; };

/** Notes that an event of the stream has come. */
export const noteEvent = () => { changed = true; };

/** Notes that the stream has ended: until it comes back, the page has all values. */
export const noteLost = () => { streamed = new WeakSet(); changed = true; };

/** Reads the page, and changes what differs. What a viewer has opened, typed or focused stays. */
async function readPage() {
  readAt = Date.now();
  changed = false;
  const address = new URL(location.href);
  for (const once of ["notice", "n", "lang", "theme"]) address.searchParams.delete(once);
  const answer = await fetch(address).catch(() => null);
  if (!answer?.ok || answer.redirected) return;
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  localTimes(fresh);
  const morph = /** @type {any} */ (window).Idiomorph.morph;
  morph(document.querySelector("main"), fresh.querySelector("main"), {
    ignoreActiveValue: true,
    callbacks: {
      beforeNodeMorphed: isPages,
      beforeAttributeUpdated: /** @param {string} name @param {Element} node */ (name, node) => !(name === "open" && node.localName === "details"),
    },
  });
}

/** Reads the page again while it is visible. */
export function keepReading() {
  const afterMs = document.querySelector("[data-costly]") ? COSTLY_MS : AFTER_MS;
  setInterval(() => {
    const age = Date.now() - readAt;
    if (!document.hidden && (age >= Math.max(afterMs, IDLE_MS) || (changed && age >= afterMs))) readPage();
  }, 1000);
}
