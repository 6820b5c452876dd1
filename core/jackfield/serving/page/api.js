// What is asked of the server, and what it says is wrong.

const STORED = "jackfield-key";
export const key = {
  get: () => sessionStorage.getItem(STORED) ?? "",
  set: (text) => (text ? sessionStorage.setItem(STORED, text) : sessionStorage.removeItem(STORED)),
};

/** What the server refused, in its words; `status` is 0 where it did not answer. */
export class Refusal extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

async function request(path, options = {}) {
  const headers = { ...options.headers };
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  let answer;
  try {
    answer = await fetch(path, { ...options, headers, cache: "no-store", redirect: "error" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal("The server does not answer. Is it still running?");
  }
  if (answer.ok) return answer;
  const said = await answer.json().catch(() => null);
  const wait = answer.headers.get("Retry-After");
  const more = wait ? ` Try again in ${wait} s.` : "";
  throw new Refusal((said?.error?.message ?? `The server answered ${answer.status}.`) + more, answer.status);
}

export const get = async (path) => (await request(path)).json();

/** The chunks of a streamed answer, as they come. Throws Refusal, also for an error within. */
export async function* stream(path, body, signal) {
  const answer = await request(path, {
    method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" }, signal,
  });
  for await (const data of events(answer.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refusal(chunk.error.message);
    yield chunk;
  }
  throw new Refusal("The answer broke off: the connection was closed before its end.");
}

/** The data of server-sent events. */
async function* events(bytes) {
  const reader = bytes.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch((error) => {
        if (error.name === "AbortError") throw error;
        throw new Refusal("The connection was lost before the answer's end.");
      });
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
