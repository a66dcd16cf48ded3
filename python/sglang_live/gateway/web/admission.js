// Who may call. Calls are opened with a secret, for which a key is changed at once; the key itself
// is kept in memory alone, for the server's counts, which are for holders of a key.

const SECRET_S = 7200; // the longest there is
const MARGIN_S = 60;
const UNKNOWN = "the server does not know this key";

let secret = null; // {value, until: ms}
let authorization = {};

export class KeyWanted extends Error {}

// Subprotocols to open a call with.
export async function admission() {
  if (secret && Date.now() < secret.until) {
    return ["realtime", `openai-insecure-api-key.${secret.value}`];
  }
  const answer = await ask("/v1/models");
  if (answer.status === 401) throw new KeyWanted("a key, please");
  if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
  return ["realtime"];
}

export function counts() {
  return fetch("/metrics", { headers: authorization });
}

export async function useKey(key) {
  // No header could carry any other.
  if (!/^[\x20-\x7e]+$/.test(key)) throw new KeyWanted(UNKNOWN);
  const bearer = { Authorization: `Bearer ${key}` };
  const answer = await ask("/v1/realtime/client_secrets", {
    method: "POST",
    headers: { ...bearer, "Content-Type": "application/json" },
    body: JSON.stringify({ expires_after: { anchor: "created_at", seconds: SECRET_S } }),
  });
  if (answer.status === 401) throw new KeyWanted(UNKNOWN);
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error.message);
  // Counted from here: the clocks of server and browser may differ.
  authorization = bearer;
  secret = { value: body.value, until: Date.now() + (SECRET_S - MARGIN_S) * 1000 };
}

// A socket was not opened, and browsers do not say why. A server that was started anew does not
// know its secrets any more; one that is down knows them when it is back.
export async function doubt() {
  if (secret && (await ask("/v1/models")).status === 401) {
    secret = null;
    throw new KeyWanted("a key, please");
  }
}

async function ask(path, options) {
  try {
    return await fetch(path, options);
  } catch {
    throw new Error("the server does not answer");
  }
}
