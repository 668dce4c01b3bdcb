"use strict";
const PAUSE = 700;  // milliseconds without a key, after which the text is compiled
const part = (id) => document.getElementById(id);
const program = part("program"), numbers = part("numbers"), shipped = part("shipped"), result = part("result");
let own = program.value, timer = 0, running = null, wrong = null;

function number() {
  const lines = program.value.split("\n").map((_, index) => {
    const line = document.createElement("div");
    line.textContent = index + 1;
    line.className = index + 1 === wrong ? "wrong" : "";
    return line;
  });
  numbers.replaceChildren(...lines);
  numbers.scrollTop = program.scrollTop;
}

function show(answer) {
  wrong = answer.line || null;
  number();
  part("error").hidden = !answer.error;
  part("error").textContent = answer.error || "";
  part("status").textContent = answer.error ? "" : answer.about;
  result.classList.toggle("stale", Boolean(answer.error));
  if (answer.error) return;
  const open = new Set([...result.querySelectorAll("details[open] > summary")].map((each) => each.textContent));
  result.innerHTML = answer.html;
  for (const each of result.querySelectorAll("summary")) each.parentNode.open = open.has(each.textContent);
  for (const each of result.querySelectorAll("pre")) if (each.scrollWidth > each.clientWidth || each.scrollHeight > each.clientHeight) each.tabIndex = 0;
}

async function compile() {
  clearTimeout(timer);
  if (running) running.abort();
  const mine = running = new AbortController();
  result.setAttribute("aria-busy", "true");
  part("status").textContent = "compiling …";
  const body = JSON.stringify({
    program: program.value, device: part("device").value, sizes: part("sizes").value, schedule: part("schedule").value,
  });
  let answer;
  try {
    const said = await fetch("compile", { method: "POST", headers: { "Content-Type": "application/json" }, body, signal: mine.signal });
    answer = said.ok ? await said.json() : { error: (await said.text()).trim(), again: said.status === 503 };
  } catch (error) {
    answer = { error: "eqfuse play does not answer: start it again, and open the address that it prints" };
  }
  if (mine !== running) return;  // another one has been asked for since
  if (answer.again) timer = setTimeout(compile, PAUSE);
  else {
    result.removeAttribute("aria-busy");
    show(answer);
  }
}

program.addEventListener("input", () => {
  shipped.value = "";
  own = program.value;
  number();
  clearTimeout(timer);
  timer = setTimeout(compile, PAUSE);
});
program.addEventListener("scroll", () => { numbers.scrollTop = program.scrollTop; });
shipped.addEventListener("change", () => {
  program.value = shipped.value || own;
  program.scrollTop = 0;
  wrong = null;
  number();
  compile();
});
for (const id of ["device", "schedule", "sizes"]) part(id).addEventListener("change", compile);
part("controls").addEventListener("submit", (event) => { event.preventDefault(); compile(); });
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); compile(); }
});
number();
compile();
