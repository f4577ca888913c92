// Calls to the server this page came from, with the key that was signed in with.

const KEY = "pagestream-key";

export const signedInKey = () => sessionStorage.getItem(KEY) ?? "";
export const keepKey = (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY));

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** What a browser says of a connection that broke is its own affair, and no help to anybody. */
async function connected(promise, words) {
  try {
    return await promise;
  } catch (error) {
    throw error instanceof TypeError ? new Error(words) : error;
  }
}

/** The response; throws ApiError, in the server's own words, for any status but 2xx. */
export async function call(path, { body, signal } = {}) {
  const headers = {};
  if (signedInKey()) headers.Authorization = `Bearer ${signedInKey()}`;
  if (body) headers["Content-Type"] = "application/json";
  const response = await connected(fetch(path, {
    method: body ? "POST" : "GET", headers, signal, body: body && JSON.stringify(body), cache: "no-store",
  }), "The server can't be reached.");
  if (response.ok) return response;
  const told = await response.json().catch(() => null);
  throw new ApiError(response.status, told?.error?.message ?? `The server answered ${response.status}.`);
}

/** The JSON of each event of a stream, to its end; comments are passed over.  An event with an error throws. */
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await connected(reader.read(), "The connection broke before the end.");
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (!data) continue;
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.code ?? 500, event.error.message);
      yield event;
    }
  }
}
