// What every page does: the viewer's time zone, questions before a write, and the live stream.
import { live } from "./live.js";

const form = new Intl.DateTimeFormat(document.documentElement.lang, {
  year: "numeric", month: "2-digit", day: "2-digit", hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23",
});
for (const time of document.querySelectorAll("time[datetime]")) {
  time.title = time.textContent;
  time.textContent = form.format(new Date(time.dateTime));
}

document.addEventListener("submit", (event) => {
  const asked = event.target.dataset.confirm;
  if (asked && !window.confirm(asked)) event.preventDefault();
});

const stream = document.body.dataset.stream;
if (stream) live(stream);
