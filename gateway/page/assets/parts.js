// @ts-check
// Times in the viewer's zone, and parts of a page that are read again while it is open.

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

/** Milliseconds between two readings after an event, and without one. */
const AFTER_MS = 5_000, IDLE_MS = 60_000;
/** The same after an event for a page that is costly to make. */
const COSTLY_MS = 30_000;
let readAt = Date.now();
let changed = false;

/** Notes that an event of the stream has come. */
export const noteEvent = () => { changed = true; };

async function readParts() {
  readAt = Date.now();
  changed = false;
  const answer = await fetch(location.href).catch(() => null);
  if (!answer?.ok) return;
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  localTimes(fresh);
  for (const part of /** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll("[data-part]"))) {
    const other = fresh.querySelector(`[data-part="${CSS.escape(part.dataset.part ?? "")}"]`);
    if (other && other.innerHTML !== part.innerHTML) part.replaceChildren(...other.childNodes);
  }
  const [cards, freshCards] = [document, fresh].map((page) => page.querySelector("[data-cards]"));
  if (cards && freshCards) readCards(cards, freshCards);
}

/** Adds new workers' cards, removes those of workers that are gone, and keeps what a viewer has opened.
 * @param {Element} cards @param {Element} fresh */
function readCards(cards, fresh) {
  const name = /** @param {Element} card */ (card) => /** @type {HTMLElement} */ (card).dataset.worker;
  const known = new Map([...cards.children].map((card) => [name(card), card]));
  const next = [...fresh.children].map((card) => known.get(name(card)) ?? card);
  if (next.length !== known.size || next.some((card, n) => card !== cards.children[n])) cards.replaceChildren(...next);
}

/** Reads the parts again while the page is visible. */
export function keepParts() {
  if (!document.querySelector("[data-part]")) return;
  const afterMs = document.querySelector("[data-costly]") ? COSTLY_MS : AFTER_MS;
  setInterval(() => {
    const age = Date.now() - readAt;
    if (!document.hidden && (age >= IDLE_MS || (changed && age >= afterMs))) readParts();
  }, 1000);
}
