// Numbers and times as people read them.

export function num(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 1000) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  if (size >= 100) return value.toFixed(1);
  if (size !== 0 && size < 0.001) return value.toExponential(1);
  return String(Number(value.toFixed(digits)));
}

// As agl.trainer.report.prices.dollars writes them.
export function dollars(value) {
  if (value === 0 || value >= 1) return `$${value.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 })}`;
  return `$${value.toFixed(Math.max(2, 1 - Math.floor(Math.log10(value))))}`;
}

// number_2 before number_10.
export const byName = (a, b) => a.localeCompare(b, "en", { numeric: true });

export function signed(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  const text = num(Math.abs(value), digits);
  return text === "0" ? "0" : `${value < 0 ? "−" : "+"}${text}`;
}

export function duration(seconds) {
  // Two moments by a clock that was set back in between say nothing of the time that has passed.
  if (seconds === null || seconds === undefined || seconds < 0) return "–";
  if (seconds < 0.0095) return `${(seconds * 1000).toFixed(1)} ms`;
  if (seconds < 0.9995) return `${(seconds * 1000).toFixed(0)} ms`;
  if (seconds < 120) return `${seconds.toFixed(1)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

export function ago(time) {
  if (!time) return "–";
  const seconds = Date.now() / 1000 - time;
  return seconds < 5 ? "just now" : `${duration(Math.max(1, Math.round(seconds))).replace(".0 s", " s")} ago`;
}

export const clock = (time) => (time ? new Date(time * 1000).toLocaleString() : "");

// A task, or any other JSON value, in one line.
export function oneLine(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "string") return value;
  if (typeof value === "object" && !Array.isArray(value)) {
    for (const name of ["question", "prompt", "problem", "instruction", "input", "task", "query", "command"]) {
      if (typeof value[name] === "string") return value[name];
    }
  }
  return JSON.stringify(value);
}

// A message's text: a string, or the texts of its parts.
export function messageText(message) {
  const { content } = message;
  if (typeof content === "string") return content;
  if (Array.isArray(content)) {
    return content.map((part) => (typeof part === "string" ? part : (part.text ?? JSON.stringify(part)))).join("");
  }
  return content === null || content === undefined ? "" : JSON.stringify(content);
}

export function toolCalls(message) {
  return (message.tool_calls || []).map((call) => {
    const { name, arguments: args } = call.function || call;
    return { id: call.id, name: String(name ?? "?"), args: typeof args === "string" ? args : JSON.stringify(args ?? {}) };
  });
}
