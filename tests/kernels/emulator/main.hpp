// Runs the kernel of the source before this, KERNEL, over a grid.

template <class P>
P taken_by(void (*)(P));
using Arguments = decltype(taken_by(KERNEL));
static Arguments arguments;
static void lane_main() {
    KERNEL(arguments);
    warp::lanes[warp::at].done = true;
    int to = warp::at;
    for (int i = 0; i < 32 && warp::lanes[to].done; i++) to = warp::lane_after(to);
    for (int i = 0; i < WARPS && warp::lanes[to].done; i++) to = warp::warp_after(to);
    warp::at = to;
    setcontext(warp::lanes[to].done ? &warp::home : &warp::lanes[to].context);
}

extern "C" void launch(int blocks_x, int blocks_y, const Arguments* params) {
    static std::vector<unsigned char> stacks(warp::THREADS * (1 << 18));
    arguments = *params;
    warp::blocks_x = blocks_x;
    for (warp::block_y = 0; warp::block_y < blocks_y; warp::block_y++)
        for (warp::block_x = 0; warp::block_x < blocks_x; warp::block_x++) {
            memset(shared_memory, 0xff, sizeof shared_memory);  // NaN
            for (int i = 0; i < warp::THREADS; i++) {
                auto& lane = warp::lanes[i];
                lane.groups.assign(1, {});
                lane.done = false;
                warp::turn[i] = 0;
                getcontext(&lane.context);
                lane.context.uc_stack.ss_sp = stacks.data() + i * (1 << 18);
                lane.context.uc_stack.ss_size = 1 << 18;
                lane.context.uc_link = nullptr;
                makecontext(&lane.context, lane_main, 0);
            }
            warp::at = 32 * warp::first_warp + warp::first;
            swapcontext(&warp::home, &warp::lanes[warp::at].context);
        }
}
extern "C" int shared_bytes() { return SHARED_BYTES; }
extern "C" void stochastic_halves(int n, const float* x, const i64* words, u16* halves) {
    for (int i = 0; i < n; i += 2) {
        const int other = i + 1 < n ? i + 1 : i;
        const u32 pair = stochastic_pair(x[i], x[other], (u32)words[i] | (u32)words[other] << 16);
        halves[i] = (u16)pair;
        if (other > i) halves[other] = (u16)(pair >> 16);
    }
}
