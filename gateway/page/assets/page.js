// What every page does: the viewer's time zone, questions before a write, and the live stream.
import { live } from "./live.js";

// The same form as the server's, in every language: nothing changes its width.
const form = new Intl.DateTimeFormat("sv-SE", { dateStyle: "short", timeStyle: "medium" });
const short = new Intl.DateTimeFormat(document.documentElement.lang, { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
for (const time of document.querySelectorAll("time[datetime]")) {
  time.title = `${time.dateTime} (UTC)`;
  time.textContent = ("short" in time.dataset ? short : form).format(new Date(time.dateTime));
}

document.addEventListener("submit", (event) => {
  const asked = event.submitter?.dataset.confirm ?? event.target.dataset.confirm;
  if (asked && !window.confirm(asked)) event.preventDefault();
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
