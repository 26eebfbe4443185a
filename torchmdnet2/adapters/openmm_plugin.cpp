// A kernel for OpenMM's PythonForce that passes positions and forces by their addresses on the device, without a copy
// through the host. It serves the Contexts that Python accepts (`begin`); OpenMM's kernel serves all others. The force
// itself, its copies and its XML are OpenMM's.
//
// Only headers of OpenMM are needed, and libOpenMM alone is linked: everything of the CUDA platform is reached through
// virtual functions.

#include "openmm/KernelFactory.h"
#include "openmm/OpenMMException.h"
#include "openmm/PythonForce.h"
#include "openmm/System.h"
#include "openmm/common/ContextSelector.h"
#include "openmm/cuda/CudaPlatform.h"
#include "openmm/internal/ContextImpl.h"
#include "openmm/kernels.h"
#include "openmm/reference/ReferencePlatform.h"
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <vector>

using namespace OpenMM;
using std::string;
using std::vector;

namespace {

// What one Context and Python exchange. ctypes has the same structure.
struct Call {
    void* callable;        // the Python object that was given to the PythonForce
    void* cudaContext;     // OpenMM's object of this name; null on platforms of the host
    int particles;         // N, those of the force
    int periodicForce;     // whether the force, and any force of the System, uses the box
    int periodicSystem;
    int includeEnergy;
    double box[9];         // nm, vectors as rows
    // --- set by Python ---
    int (*evaluate)();     // computes forces (and the energy) for the positions; 0 if it could not; null before `start`
    const char* error;     // the reason
    void* positions;       // [N, 3], to be written
    void* forces;          // [N, 3], to be read
    void* wrapped;         // [N, 3] double; if set, it gets the positions, and `positions` those of a whole molecule
    int positionsAreDouble, forcesAreDouble;
    double length, force;  // their units, per nm and in kJ/mol/nm
    double energy;         // kJ/mol
};

// `begin` accepts a Context, `start` comes before its first evaluation, `end` with its end. OpenMM does not free what
// belongs to a Context whose creation fails, so that `end` is never called for it: nothing may be kept before `start`.
typedef int (*Begin)(Call*);
typedef void (*End)(Call*);
Begin begin = nullptr, start = nullptr;
End end = nullptr;

// Wrapped positions are those of a molecule if each atom takes its nearest image to the first one, as `made_whole` does
// on the host. A molecule that is too long gets positions that are not finite, which stops the evaluation.
const char* source = R"(
KERNEL void readPositions(GLOBAL const real4* RESTRICT posq, GLOBAL const real4* RESTRICT correction,
        GLOBAL const int* RESTRICT atomIndex, GLOBAL const int* RESTRICT place, mm_ulong positions, int isDouble,
        double length) {
    for (int i = GLOBAL_ID; i < NUM_ATOMS; i += GLOBAL_SIZE) {
        int k = place[atomIndex[i]];
        if (k < 0)
            continue;
        real4 p = posq[i];
        double x = p.x, y = p.y, z = p.z;
#ifdef USE_MIXED_PRECISION
        real4 c = correction[i];
        x += c.x;
        y += c.y;
        z += c.z;
#endif
        if (isDouble) {
            GLOBAL double* to = (GLOBAL double*) positions + 3*k;
            to[0] = length*x;
            to[1] = length*y;
            to[2] = length*z;
        }
        else {
            GLOBAL float* to = (GLOBAL float*) positions + 3*k;
            to[0] = (float) (length*x);
            to[1] = (float) (length*y);
            to[2] = (float) (length*z);
        }
    }
}

DEVICE void nearest(GLOBAL const double* RESTRICT from, int k, double ax, double bx, double by, double cx, double cy,
        double cz, double* x, double* y, double* z) {
    *x = from[3*k]-from[0];
    *y = from[3*k+1]-from[1];
    *z = from[3*k+2]-from[2];
    double c = *z/cz, b = (*y-c*cy)/by, a = (*x-b*bx-c*cx)/ax;
    a = rint(a);
    b = rint(b);
    c = rint(c);
    *x -= a*ax+b*bx+c*cx;
    *y -= b*by+c*cy;
    *z -= c*cz;
}

KERNEL void makeWhole(mm_ulong wrapped, mm_ulong positions, int isDouble, int particles, double limit, double ax,
        double bx, double by, double cx, double cy, double cz) {
    GLOBAL const double* from = (GLOBAL const double*) wrapped;
    for (int k = GLOBAL_ID; k < particles; k += GLOBAL_SIZE) {
        double x, y, z, u, v, w, longest = 0;
        nearest(from, k, ax, bx, by, cx, cy, cz, &x, &y, &z);
        for (int j = 0; j < particles; j++) {
            nearest(from, j, ax, bx, by, cx, cy, cz, &u, &v, &w);
            longest = fmax(longest, (u-x)*(u-x)+(v-y)*(v-y)+(w-z)*(w-z));
        }
        if (longest >= limit*limit)
            x = sqrt(-1.0);
        x += from[0];
        y += from[1];
        z += from[2];
        if (isDouble) {
            GLOBAL double* to = (GLOBAL double*) positions + 3*k;
            to[0] = x;
            to[1] = y;
            to[2] = z;
        }
        else {
            GLOBAL float* to = (GLOBAL float*) positions + 3*k;
            to[0] = (float) x;
            to[1] = (float) y;
            to[2] = (float) z;
        }
    }
}

KERNEL void addForces(GLOBAL mm_ulong* RESTRICT buffer, GLOBAL const int* RESTRICT atomIndex,
        GLOBAL const int* RESTRICT place, mm_ulong forces, int isDouble, double unit) {
    for (int i = GLOBAL_ID; i < NUM_ATOMS; i += GLOBAL_SIZE) {
        int k = place[atomIndex[i]];
        if (k < 0)
            continue;
        for (int d = 0; d < 3; d++) {
            double f = isDouble ? ((GLOBAL const double*) forces)[3*k+d] : ((GLOBAL const float*) forces)[3*k+d];
            // atomic, since another stream may add those of PME at the same time
            ATOMIC_ADD(&buffer[i+d*PADDED_NUM_ATOMS], (mm_ulong) ((mm_long) (f*unit*0x100000000)));
        }
    }
}
)";

class PointerKernel : public CalcPythonForceKernel {
public:
    PointerKernel(string name, const Platform& platform, ContextImpl& context, const KernelFactory& standard)
            : CalcPythonForceKernel(name, platform), context(context), standard(standard) {
    }
    ~PointerKernel() {
        if (accepted && end)
            end(&call);
    }
    void initialize(const ContextImpl&, const PythonForce& force) {
        const System& system = context.getSystem();
        particles = force.getParticles();
        if (particles.empty())
            for (int i = 0; i < system.getNumParticles(); i++)
                particles.push_back(i);
        call.particles = particles.size();
        call.periodicForce = force.usesPeriodicBoundaryConditions();
        call.periodicSystem = system.usesPeriodicBoundaryConditions();
        // OpenMM's wrapper of a Python function: a class with virtual functions, whose first member is the function
        call.callable = reinterpret_cast<void* const*>(&force.getComputation())[1];
        accepted = begin && ask();
        if (!accepted) {
            other = Kernel(standard.createKernelImpl(getName(), getPlatform(), context));
            other.getAs<CalcPythonForceKernel>().initialize(context, force);
        }
    }
    double execute(ContextImpl& context, bool includeForces, bool includeEnergy) {
        if (!accepted)
            return other.getAs<CalcPythonForceKernel>().execute(context, includeForces, includeEnergy);
        if (!end)
            throw OpenMMException("torchmdnet2: Python has ended");
        Vec3 box[3];
        context.getPeriodicBoxVectors(box[0], box[1], box[2]);
        for (int i = 0; i < 9; i++)
            call.box[i] = box[i/3][i%3];
        call.includeEnergy = includeEnergy;
        call.energy = 0;
        compute(includeForces);
        return includeEnergy ? call.energy : 0.0;
    }

protected:
    virtual bool ask() { // whether Python accepts the Context
        return begin(&call);
    }
    virtual void compute(bool includeForces) = 0;
    void prepare() {
        call.error = "torchmdnet2: the start was interrupted";
        if (!call.evaluate && !start(&call))
            throw OpenMMException(call.error);
    }
    void evaluate() {
        call.error = "torchmdnet2: the evaluation was interrupted";
        if (!call.evaluate())
            throw OpenMMException(call.error);
    }
    ContextImpl& context;
    vector<int> particles;
    Call call = {};

private:
    const KernelFactory& standard;
    bool accepted = false;
    Kernel other;
};

class CudaPointerKernel : public PointerKernel {
public:
    using PointerKernel::PointerKernel;

protected:
    bool ask() {
        auto& contexts = static_cast<CudaPlatform::PlatformData*>(context.getPlatformData())->contexts;
        if (contexts.size() != 1) // several GPUs
            return false;
        call.cudaContext = contexts[0];
        // the base class, without CudaContext.h, which needs headers of CUDA
        cc = reinterpret_cast<ComputeContext*>(contexts[0]);
        ContextSelector selector(*cc);
        return PointerKernel::ask();
    }
    void compute(bool includeForces) {
        ContextSelector selector(*cc);
        prepare();
        if (!read)
            compile();
        mm_ulong to = reinterpret_cast<mm_ulong>(call.wrapped ? call.wrapped : call.positions);
        read->setArg(4, to);
        read->setArg(5, call.wrapped ? 1 : call.positionsAreDouble);
        read->execute(cc->getNumAtoms());
        if (call.wrapped)
            makeWhole();
        evaluate();
        if (includeForces) {
            add->setArg(3, reinterpret_cast<mm_ulong>(call.forces));
            add->setArg(4, call.forcesAreDouble);
            add->execute(cc->getNumAtoms());
        }
    }

private:
    typedef unsigned long long mm_ulong;

    void compile() {
        vector<int> places(cc->getNumAtoms(), -1);
        for (int k = 0; k < call.particles; k++)
            places[particles[k]] = k;
        place.reset(cc->createArray());
        place->initialize<int>(*cc, places.size(), "torchmdnet2Place");
        place->upload(places);
        ComputeProgram program = cc->compileProgram(source, {{"NUM_ATOMS", std::to_string(cc->getNumAtoms())},
                {"PADDED_NUM_ATOMS", std::to_string(cc->getPaddedNumAtoms())}});
        whole = program->createKernel("makeWhole");
        for (int i = 0; i < 11; i++)
            whole->addArg();
        add = program->createKernel("addForces");
        add->addArg(cc->getLongForceBuffer());
        add->addArg(cc->getAtomIndexArray());
        add->addArg(*place);
        add->addArg();
        add->addArg();
        add->addArg(call.force);
        read = program->createKernel("readPositions");
        read->addArg(cc->getPosq());
        read->addArg(cc->getUseMixedPrecision() ? cc->getPosqCorrection() : cc->getPosq());
        read->addArg(cc->getAtomIndexArray());
        read->addArg(*place);
        read->addArg();
        read->addArg();
        read->addArg(call.length);
    }
    void makeWhole() {
        double v[9];
        for (int i = 0; i < 9; i++)
            v[i] = call.length*call.box[i];
        // vectors are lower triangular: columns of the inverse have the inverse widths as norms
        double ax = v[0], bx = v[3], by = v[4], cx = v[6], cy = v[7], cz = v[8];
        double bInverse = bx/(ax*by), cInverse = (bx*cy-by*cx)/(ax*by*cz), most = std::fmax(1/cz, 0.0);
        most = std::fmax(most, std::sqrt(1/(by*by)+cy*cy/(by*by*cz*cz)));
        most = std::fmax(most, std::sqrt(1/(ax*ax)+bInverse*bInverse+cInverse*cInverse));
        whole->setArg(0, reinterpret_cast<mm_ulong>(call.wrapped));
        whole->setArg(1, reinterpret_cast<mm_ulong>(call.positions));
        whole->setArg(2, call.positionsAreDouble);
        whole->setArg(3, call.particles);
        double values[] = {0.5/most, ax, bx, by, cx, cy, cz};
        for (int i = 0; i < 7; i++)
            whole->setArg(4+i, values[i]);
        whole->execute(call.particles);
    }
    ComputeContext* cc = nullptr;
    std::unique_ptr<ArrayInterface> place;
    ComputeKernel read, whole, add;
};

// For tests, and computers without a GPU. The CPU platform is derived from the Reference platform and shares its data.
class ReferencePointerKernel : public PointerKernel {
public:
    using PointerKernel::PointerKernel;

protected:
    void compute(bool includeForces) {
        prepare();
        auto data = static_cast<ReferencePlatform::PlatformData*>(context.getPlatformData());
        for (int i = 0; i < 3*call.particles; i++) {
            double x = (*data->positions)[particles[i/3]][i%3]*call.length;
            if (call.positionsAreDouble)
                static_cast<double*>(call.positions)[i] = x;
            else
                static_cast<float*>(call.positions)[i] = x;
        }
        evaluate();
        for (int i = 0; includeForces && i < 3*call.particles; i++) {
            double f = call.forcesAreDouble ? static_cast<double*>(call.forces)[i] : static_cast<float*>(call.forces)[i];
            (*data->forces)[particles[i/3]][i%3] += f*call.force;
        }
    }
};

class Factory : public KernelFactory {
public:
    Factory(const KernelFactory& standard) : standard(standard) {
    }
    KernelImpl* createKernelImpl(string name, const Platform& platform, ContextImpl& context) const {
        if (platform.getName() == "CUDA")
            return new CudaPointerKernel(name, platform, context, standard);
        if (platform.getName() == "Reference" || platform.getName() == "CPU")
            return new ReferencePointerKernel(name, platform, context, standard);
        return standard.createKernelImpl(name, platform, context);
    }

private:
    const KernelFactory& standard;
};

// A Platform does not say which factory it has, except like this: access is not checked in explicit instantiations.
typedef std::map<string, KernelFactory*> Factories;
template <Factories Platform::*member> struct Access {
    friend Factories& factoriesOf(Platform& platform) {
        return platform.*member;
    }
};
Factories& factoriesOf(Platform& platform);
template struct Access<&Platform::kernelFactories>;

} // namespace

extern "C" {

// OpenMM's version and the checksum of this file
const char* torchmdnet2_key() {
    return TORCHMDNET2_KEY;
}

// Use these kernels in Contexts that are created from now on; return 0 if the platform has none for PythonForce.
int torchmdnet2_register(const char* platform) {
    Factories& factories = factoriesOf(Platform::getPlatformByName(platform));
    auto found = factories.find(CalcPythonForceKernel::Name());
    if (found == factories.end())
        return 0;
    if (!dynamic_cast<Factory*>(found->second))
        found->second = new Factory(*found->second);
    return 1;
}

// Functions that accept a Context, start and release it; null once Python ends, since Contexts may live longer.
void torchmdnet2_connect(Begin first, Begin second, End last) {
    begin = first;
    start = second;
    end = last;
}
}
