// On every page: times in the viewer's zone, confirmation of writes, and the live stream.
import { live } from "./live.js";
import { keepReading, localTimes } from "./reread.js";

localTimes(document);

document.addEventListener("submit", (event) => {
  const question = event.submitter?.dataset.confirm ?? event.target.dataset.confirm;
  if (question && !window.confirm(question)) event.preventDefault();
});

for (const all of document.querySelectorAll("input[data-all]")) {
  all.addEventListener("change", () => {
    for (const one of document.querySelectorAll(`input[name="${all.dataset.all}"]`)) one.checked = all.checked;
  });
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest?.("[data-copy]");
  if (!button) return;
  const text = button.dataset.copy;
  try {
    await navigator.clipboard.writeText(text);
  } catch { // without https there is no clipboard for scripts: the id is selected, to be copied by hand
    const field = document.createElement("input");
    field.value = text;
    button.after(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
  button.classList.add("copied");
  setTimeout(() => button.classList.remove("copied"), 1500);
});

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
if (stream) {
  live(stream);
  keepReading();
}
