// What to do about an error. The gateway's own text says what was wrong; this adds what a reader can do here.

const BY_STATUS = {
  400: "Change the message or the settings, or start a new chat if this one has grown too long.",
  401: "Enter a key under Settings.",
  403: "Use another key, under Settings, or ask whoever runs the gateway.",
  404: "Choose another model above.",
  413: "Shorten the message, or start a new chat.",
  429: "The server has all the work it takes. Try again in a moment.",
  503: "The server takes no work just now. Try again in a moment.",
  504: "It took too long. Try again, or ask for fewer tokens under Settings.",
};

/** One sentence or two, for people. */
export function explain(error) {
  const said = sentence(error.message || "something failed");
  return `${said} ${adviceFor(error)}`;
}

function adviceFor(error) {
  if (error.status === null) return "See that the gateway runs and that you are online, then try again.";
  return BY_STATUS[error.status] ?? "Try again; if it stays, the gateway's log says more.";
}

function sentence(text) {
  const trimmed = text.trim().replace(/^\[[A-Z_]+\]\s*/, "");
  const begun = trimmed.charAt(0).toUpperCase() + trimmed.slice(1);
  return /[.!?]$/.test(begun) ? begun : `${begun}.`;
}
