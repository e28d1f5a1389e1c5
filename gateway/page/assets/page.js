// On every page: times in the viewer's zone, confirmation of writes, and the live stream.
import { live } from "./live.js";

// As the server writes them, in every language, so that no width changes.
const form = new Intl.DateTimeFormat("sv-SE", { dateStyle: "short", timeStyle: "medium" });
const short = new Intl.DateTimeFormat(document.documentElement.lang, { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
for (const time of document.querySelectorAll("time[datetime]")) {
  time.title = `${time.dateTime} (UTC)`;
  time.textContent = ("short" in time.dataset ? short : form).format(new Date(time.dateTime));
}

document.addEventListener("submit", (event) => {
  const question = event.submitter?.dataset.confirm ?? event.target.dataset.confirm;
  if (question && !window.confirm(question)) event.preventDefault();
});

for (const all of document.querySelectorAll("input[data-all]")) {
  all.addEventListener("change", () => {
    for (const one of document.querySelectorAll(`input[name="${all.dataset.all}"]`)) one.checked = all.checked;
  });
}

const drop = document.getElementById("drop");
if (drop) {
  const input = document.getElementById("file");
  for (const name of ["dragenter", "dragover"]) drop.addEventListener(name, (event) => { event.preventDefault(); drop.classList.add("over"); });
  for (const name of ["dragleave", "drop"]) drop.addEventListener(name, () => drop.classList.remove("over"));
  drop.addEventListener("drop", (event) => {
    event.preventDefault();
    if (event.dataTransfer?.files.length) input.files = event.dataTransfer.files;
  });
}

const stream = document.body.dataset.stream;
if (stream) live(stream);
